"""Answers as models of families write them, by their published templates and model cards, and what they say.

A template is told here by the parts of its source that tell its form.
"""

from dataclasses import dataclass

QWEN3 = "{%- for tool in tools %}<tool_call>{{ message.tool_calls }}</tool_call><think></think>"
HERMES = "{%- for tool in tools %}<tool_call>{{ message.tool_calls }}</tool_call>"
LLAMA = """{%- for t in tools %}<|python_tag|>{{- '"parameters": ' }}"""
LLAMA_PYTHON = """{{ tools }}Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]"""
FUNCTIONARY = """{{ tools }}{{ '>>>all\\n' + message['content'] }}{{ '>>>' + name + '\\n' + arguments }}"""
MISTRAL_LIST = "{%- for tool in tools %}[TOOL_CALLS][{{ message.tool_calls }}{{ id|length != 9 }}"
MISTRAL = "{{ tools }}[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}"
MINISTRAL = f"{MISTRAL}[THINK][/THINK]"
GEMMA = "{{ '<start_of_turn>' + role + '\\n' }}{{ message['content'] | trim }}<end_of_turn>"
PHI = "{% if message['role'] == 'system' and 'tools' in message %}{{ '<|tool|>' + message['tools'] + '<|/tool|>' }}"
GRANITE = (
    "{% if tools %}respond only with <|tool_call|> followed by a JSON list of tools used{% endif %}<think></think>"
)
DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c></think>"
SEED = "{%- for item in tools %}{{ message.tool_calls }}<seed:tool_call><function=name></function></seed:think>"
EXAONE_DEEP = "{% if '</thought>' in content %}{% endif %}{{ '\\n[|assistant|]<thought>\\n' }}"
GLM = "[gMASK]<sop>{%- for tool in tools %}{% endfor %}{{ message.metadata }}"
GLM_Z1 = f"{GLM}<think></think>"
GLM_2024 = "[gMASK]<sop>{% if item['tools'] is defined %}{% endif %}<|{{ item['role'] }}|>{{ item['metadata'] }}"
OLMO = "{{ tools }}<function_calls>{{ calls }}</function_calls>"
COHERE = (
    "{% for tool in tools %}{{ message.tool_calls }}<|START_THINKING|>{{ message.reasoning_content }}<|END_THINKING|>"
    "<|START_ACTION|>[]<|END_ACTION|>"
)
LFM2 = "{%- for tool in tools -%}<|tool_list_start|>{%- endfor -%}<|tool_list_end|>{{ content }}"
LFM2_5 = '{%- if tools -%}{{ "List of tools: [" }}{%- endif -%}{{ content.split("</think>") }}<think>'
QWEN_XML = (
    "{%- for tool in tools %}{{ '<tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>' }}{% endfor %}"
    "{{ message.tool_calls }}<think></think>"
)
GEMMA4 = "{%- for tool in tools %}{{ message.tool_calls }}<|tool_call>call:{{ name }}{}<tool_call|><channel|>"
WEATHER = ("get_weather", {"city": "Paris"})
ADD = ("add", {"a": 1, "b": [2.5, None, True]})


@dataclass(frozen=True, slots=True)
class Recorded:
    """An answer, and what it says."""

    template: str
    answer: str
    calls: tuple[tuple[str, object], ...] = ()
    text: str = ""
    thought: str = ""
    opened: bool = False
    """The prompt ends within an open thought."""


RECORDED = {
    "qwen3 thinks and calls": Recorded(
        QWEN3,
        "<think>\nThe user asks for\n\nthe weather.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        (WEATHER,), thought="The user asks for\n\nthe weather.",
    ),
    "qwen3 calls twice": Recorded(
        QWEN3,
        '<think>\n\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2.5, null, true]}}\n</tool_call>',
        (WEATHER, ADD),
    ),
    "qwen3 thinks and says": Recorded(
        QWEN3, "<think>\nEasy.\n</think>\n\nIt is **4**.\n", text="It is **4**.\n", thought="Easy.",
    ),
    "seed-oss thinks and says": Recorded(
        SEED, "<seed:think>\nEasy.\n</seed:think>It is 4.", text="It is 4.", thought="Easy.",
    ),
    "seed-oss thinks and calls twice": Recorded(
        SEED,
        "<seed:think>Hm.</seed:think>\n<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
        "<parameter=b>[2.5, None, True]</parameter>\n</function>\n</seed:tool_call>",
        (WEATHER, ADD), thought="Hm.",
    ),
    "seed-oss leaves an end out": Recorded(
        SEED, "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</seed:tool_call>",
        (WEATHER,),
    ),
    "seed-oss in JSON": Recorded(
        SEED, 'So:<seed:tool_call><function=get_weather>{"city": "Paris"}</function></seed:tool_call>', (WEATHER,),
        text="So:",
    ),
    "exaone deep thinks and says": Recorded(
        EXAONE_DEEP, "Easy.\n</thought>\n\nIt is 4.", text="It is 4.", thought="Easy.", opened=True,
    ),
    "glm 4": Recorded(GLM, 'get_weather\n{"city": "Paris"}', (WEATHER,)),
    "glm 4 says": Recorded(GLM, "\nadd them", text="\nadd them"),
    "glm z1 thinks and calls": Recorded(
        GLM_Z1, 'Easy.\n</think>\nadd\n{"a": 1, "b": [2.5, null, true]}', (ADD,), thought="Easy.", opened=True,
    ),
    "hermes says and calls": Recorded(
        HERMES,
        "I shall look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
        (WEATHER,), text="I shall look.\n",
    ),
    "hermes, arguments in front, and a list": Recorded(
        HERMES,
        '<tool_call>\n[{"arguments": {"city": "Paris"}, "name": "get_weather"}, {"name": "add", "arguments": '
        '"{\\"a\\": 1, \\"b\\": [2.5, null, true]}"}]\n</tool_call>',
        (WEATHER, ADD),
    ),
    "hermes without marks": Recorded(HERMES, '{"name": "get_weather", "arguments": {"city": "Paris"}}', (WEATHER,)),
    "qwen2.5 coder in a fence": Recorded(
        HERMES, '```json\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n```', (WEATHER,)
    ),
    "qwen2.5 coder says and calls in a fence": Recorded(
        HERMES,
        'I look.\n```json\n{\n  "name": "get_weather",\n  "arguments": {\n    "city": "Paris"\n  }\n}\n```',
        (WEATHER,), text="I look.\n",
    ),
    "qwen2.5 coder within the tag of tools": Recorded(
        HERMES, '<tools>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tools>', (WEATHER,),
    ),
    "a thought that is opened twice": Recorded(
        QWEN3, "<think>\nHm.\n</think>\n\nParis.", text="Paris.", thought="Hm.", opened=True
    ),
    "llama 3.1": Recorded(LLAMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', (WEATHER,)),
    "llama 3.1 with a tag and a type": Recorded(
        LLAMA, '<|python_tag|>{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}', (WEATHER,)
    ),
    "llama 3.1 twice": Recorded(
        LLAMA,
        '{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "add", "parameters": {"a": 1, "b": [2.5, null, true]}}',
        (WEATHER, ADD),
    ),
    "llama 3.2 in Python": Recorded(
        LLAMA, "[get_weather(city='Paris'), add(a=1, b=[2.5, None, True])]", (WEATHER, ADD),
    ),
    "llama 4 in Python": Recorded(
        LLAMA_PYTHON, '<|python_start|>[get_weather(city="Paris")]<|python_end|>', (WEATHER,),
    ),
    "llama in Python, and text": Recorded(
        LLAMA_PYTHON, '[get_weather(city="Paris")]\n\nThat (tells) it.', (WEATHER,), text="That (tells) it.",
    ),
    "functionary 3.2 calls twice": Recorded(
        FUNCTIONARY, 'get_weather\n{"city": "Paris"}>>>add\n{"a": 1, "b": [2.5, null, true]}', (WEATHER, ADD),
    ),
    "functionary 3.2 says": Recorded(FUNCTIONARY, "all\nIt is all\nright", text="It is all\nright"),
    "functionary 3.2 says and calls": Recorded(
        FUNCTIONARY, 'all\nI look. >>>get_weather\n{"city": "Paris"}', (WEATHER,), text="I look. ",
    ),
    "mistral nemo": Recorded(
        MISTRAL_LIST,
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "Xk3bJ9QzL"}, '
        '{"name": "add", "arguments": {"a": 1, "b": [2.5, null, true]}, "id": "Xk3bJ9QzM"}]',
        (WEATHER, ADD),
    ),
    "mistral small 3.2": Recorded(
        MISTRAL,
        '[TOOL_CALLS]get_weather[CALL_ID]Xk3bJ9QzL[ARGS]{"city": "Paris"}'
        '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2.5, null, true]}',
        (WEATHER, ADD),
    ),
    "ministral 3 thinks": Recorded(
        MINISTRAL, '[THINK]Hm.[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', (WEATHER,), thought="Hm.",
    ),
    "gemma in JSON": Recorded(GEMMA, '{"name": "get_weather", "parameters": {"city": "Paris"}}', (WEATHER,)),
    "gemma in a fence of JSON": Recorded(
        GEMMA, '```json\n{\n  "name": "get_weather",\n  "parameters": {\n    "city": "Paris"\n  }\n}\n```\n', (WEATHER,)
    ),
    "gemma in Python": Recorded(
        GEMMA, '[get_weather(city="Paris"), add(a=1, b=[2.5, None, True])]', (WEATHER, ADD)
    ),
    "gemma in a fence of code": Recorded(
        GEMMA, "Okay.\n```tool_code\nprint(get_weather(city='Paris'))\nadd(a=1, b=[2.5, null, true])\n```",
        (WEATHER, ADD), text="Okay.\n",
    ),
    "gemma 4 thinks and calls twice": Recorded(
        GEMMA4,
        '<|channel>thought\nBoth.\n<channel|><|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>'
        "<|tool_call>call:add{a:1,b:[2.5,None,true]}<tool_call|>",
        (WEATHER, ADD), thought="Both.",
    ),
    "gemma 4, strings of any letters": Recorded(
        GEMMA4, 'So: <|tool_call>call:get_weather{city:<|"|>a: {"b", c:1}\n<|"|>,at:{x y:<|"|><|"|>}}<tool_call|>',
        (("get_weather", {"city": 'a: {"b", c:1}\n', "at": {"x y": ""}}),), text="So: ",
    ),
    "gemma 4 in JSON, with what closes objects in a string": Recorded(
        GEMMA4, '<|tool_call>call:get_weather{"city": "a } b ] \\" {", "at": <|"|>x<|"|>}<tool_call|>',
        (("get_weather", {"city": 'a } b ] " {', "at": "x"}),),
    ),
    "gemma 4 with Python's constants": Recorded(
        GEMMA4, '<|tool_call>call:add{a:None,b:[True,False,<|"|>None, c:True<|"|>]}<tool_call|>',
        (("add", {"a": None, "b": [True, False, "None, c:True"]}),),
    ),
    "gemma 4 says what looks like a call": Recorded(
        GEMMA4, "Just call: get_weather {x} please", (), text="Just call: get_weather {x} please"
    ),
    "gemma 4 thinks twice, and ends what it has not begun": Recorded(
        GEMMA4,
        "<|channel>thought\nOne.<channel|>\n<|channel>thought\nTwo.\n<channel|><channel|><|channel>"
        'No.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        (WEATHER,), text="No.", thought="One.Two.",
    ),
    "gemma 4 in JSON": Recorded(GEMMA4, '<|tool_call>call:get_weather{"city": "Paris"}<tool_call|>', (WEATHER,)),
    "phi 4 mini": Recorded(
        PHI,
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
        '{"name": "add", "arguments": {"a": 1, "b": [2.5, null, true]}}]<|/tool_call|>',
        (WEATHER, ADD),
    ),
    "phi 4 mini by its other name": Recorded(
        PHI, 'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}]', (WEATHER,)
    ),
    "granite 3.3": Recorded(
        GRANITE, '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', (WEATHER,)
    ),
    "granite 3.1 without bars": Recorded(
        GRANITE, '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', (WEATHER,),
    ),
    "deepseek r1": Recorded(
        DEEPSEEK,
        "Hm.\n</think>\n\n<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        '<\uff5ctool\u2581sep\uff5c>get_weather\n```json\n{"city": "Paris"}\n```<\uff5ctool\u2581call\u2581end\uff5c>\n'
        "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>add\n```json\n"
        '{"a": 1, "b": [2.5, null, true]}\n```<\uff5ctool\u2581call\u2581end\uff5c>'
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        (WEATHER, ADD), thought="Hm.", opened=True,
    ),
    "olmo 3": Recorded(
        OLMO, '<function_calls>\nget_weather(city="Paris")\nadd(a=1, b=[2.5, null, true])\n</function_calls>',
        (WEATHER, ADD),
    ),
    "command r7b thinks and calls twice": Recorded(
        COHERE,
        "<|START_THINKING|>I will look.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}},\n'
        '    {"tool_call_id": "1", "tool_name": "add", "parameters": {"a": 1, "b": [2.5, null, true]}}\n'
        "]<|END_ACTION|>",
        (WEATHER, ADD), thought="I will look.",
    ),
    "command r7b, arguments in front": Recorded(
        COHERE,
        '<|START_ACTION|>[{"parameters": {"city": "Paris"}, "tool_call_id": "0", "tool_name": "get_weather"}]'
        "<|END_ACTION|>",
        (WEATHER,),
    ),
    "qwen 3.5 thinks and calls twice": Recorded(
        QWEN_XML,
        "I look it up.\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n"
        "[2.5, null, true]\n</parameter>\n</function>\n</tool_call>",
        (WEATHER, ADD), thought="I look it up.", opened=True,
    ),
    "qwen 3.5, a text in lines": Recorded(
        QWEN_XML,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\nParis\n  or </p>\n\n</parameter>\n</function>\n"
        "</tool_call>",
        (("get_weather", {"city": "\nParis\n  or </p>\n"}),),
    ),
    "qwen 3.5, values without lines of their own, and an empty one": Recorded(
        QWEN_XML,
        "<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n</parameter>\n</function>\n</tool_call>",
        (WEATHER, ("get_weather", {"city": ""})),
    ),
    "qwen 3.5 calls while it thinks": Recorded(
        QWEN_XML,
        "I look it up.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call>",
        (WEATHER,), thought="I look it up.", opened=True,
    ),
    "lfm2 calls twice": Recorded(
        LFM2, '<|tool_call_start|>[get_weather(city="Paris"), add(a=1, b=[2.5, None, True])]<|tool_call_end|>'
        "I look it up.",
        (WEATHER, ADD), text="I look it up.",
    ),
    "lfm2.5 thinks and calls": Recorded(
        LFM2_5, "<think>Paris it is.</think>\n<|tool_call_start|>[get_weather(city='Paris')]<|tool_call_end|>",
        (WEATHER,), thought="Paris it is.",
    ),
    "lfm2, strings of any letters, and in lines": Recorded(
        LFM2, "<|tool_call_start|>[get_weather(city='a, (b] \\'c\\' \\ud83d\\ude00\nd'),\n"
        "add(a=-1.5, b={'c': [True, null]})]"
        "<|tool_call_end|>",
        (("get_weather", {"city": "a, (b] 'c' \U0001f600\nd"}), ("add", {"a": -1.5, "b": {"c": [True, None]}})),
    ),
    "lfm2.5, JSON": Recorded(
        LFM2_5, 'Sure.<|tool_call_start|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]<|tool_call_end|>',
        (WEATHER,), text="Sure.",
    ),
    "smollm2": Recorded(
        GEMMA, '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>', (WEATHER,)
    ),
}  # fmt: skip
"""By what they show."""

PLAIN = {
    "an unknown function": (HERMES, '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call> done'),
    "a mark and text": (HERMES, "Write <tool_call> and then </tool_call>."),
    "a mark at the end": (HERMES, "It begins with <tool_call>"),
    "a fence of what is no call": (HERMES, 'So:\n```json\n{"name": "Ann", "age": 3}\n```\nand ```js\nadd()\n```'),
    "half a mark": (HERMES, "a <tool_ca"),
    "JSON": (HERMES, ' {"a": [1, {"name": "add"}]} and more'),
    "JSON like a call's": (LLAMA, '{"name": "Ann", "age": 3}'),
    "a list of numbers": (LLAMA, "[1, 2] are two; [add] is one"),
    "a name alone, without a mark": (FUNCTIONARY, "add them >>> up"),
    "a tag of tools": (HERMES, "<tools> are named in <tools></tools>"),
    "JSON that is cut": (LLAMA, '{"name": "add", "parame'),
    "JSON that is none": (LLAMA, "{'name': 'add', 'parameters': {}}"),
    "a list": (MISTRAL_LIST, "[1] first\n[2] second"),
    "a list behind a mark": (MISTRAL_LIST, "[TOOL_CALLS][]"),
    "a name alone": (MISTRAL, "[TOOL_CALLS]add"),
    "a fence": (GEMMA, "So:\n```json\n[1, 2]\n```\nand\n```tool_code\nadd(1, 2)\n```\n"),
    "code that is none": (GEMMA, "[add(a=)]"),
    "code that does something": (GEMMA, "[add(a=open('x'))]"),
    "a name that begins a text": (GLM, "add\nthem, {or} not"),
    "a name and braces in one line": (GLM, "get_weather {see below} is set"),
    "a name, and a word before braces": (GLM, "add\nthem {all}"),
    "a call of no function": (GEMMA4, "<|tool_call>call:rm{}<tool_call|> done"),
    "a name of no function": (GLM_2024, 'rm\n{"a": 1}'),
    "an element of no function": (SEED, "<function=rm>\n<parameter=a>1</parameter>\n</function>"),
    "an element that is no parameter": (SEED, "<seed:tool_call>\n<function=add>\n<a>1</a>\n</function>"),
    "a word": (PHI, "Use functools.partial for it."),
    "a thought later": (QWEN3, "It writes <think> first, then </think>."),
    "spaces": (QWEN3, " \n two\n "),
    "spaces alone": (QWEN3, " \n "),
}
"""Answers that say what they are, with no call and no thought."""
