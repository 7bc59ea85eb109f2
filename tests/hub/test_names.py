"""The models among a repository's files, and what they are called."""

import pytest

from tegrad.hub.names import ModelNameError, chosen, models_of


@pytest.mark.parametrize(
    ("file", "tag"),
    [
        ("SmolLM2-135M-Instruct-Q8_0.gguf", "Q8_0"),
        ("qwen2.5-7b-instruct-q4_k_m.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf", "Q4_K_M"),
        ("gemma-3-1b-it-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("Phi-3-mini-4k-instruct-q4.gguf", "Q4"),
        ("Phi-3-mini-4k-instruct-fp16.gguf", "F16"),
        ("Llama-3.2-1B-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-MXFP4.gguf", "MXFP4"),
        ("model-bf16.gguf", "BF16"),
        ("Q6_K/part.gguf", "Q6_K"),
        ("Qwen3-0.6B.gguf", "Qwen3-0.6B"),
    ],
)
def test_a_files_name_has_its_quantization(file: str, tag: str) -> None:
    (model,) = models_of("a/b", {file: 1})
    assert model.name == f"a/b:{tag}"
    assert model.is_called(tag.lower())


def test_parts_are_one_model_and_too_few_are_none() -> None:
    files = {f"x-Q4_0-0000{number}-of-00003.gguf": 10 + number for number in (3, 1, 2)}
    (model,) = models_of("a/b", files)
    assert (model.tag, model.size, model.files[0]) == ("Q4_0", 36, "x-Q4_0-00001-of-00003.gguf")
    files.popitem()
    assert models_of("a/b", files) == []


def test_image_encoders_statistics_and_other_files_are_no_models() -> None:
    files = ["mmproj-F16.gguf", "x-mmproj-BF16.gguf", "x-imatrix.gguf", "config.json", "x-Q8_0.safetensors"]
    assert models_of("a/b", dict.fromkeys(files, 1)) == []


def test_two_files_of_a_quantization_are_called_by_their_own_names() -> None:
    models = models_of("a/b", {"1b-Q4_0.gguf": 1, "3b-Q4_0.gguf": 1, "s/9b-Q8_0.gguf": 1, "t/9b-Q8_0.gguf": 1})
    assert [model.tag for model in models] == ["1b-Q4_0", "3b-Q4_0", "s/9b-Q8_0", "t/9b-Q8_0"]
    with pytest.raises(ModelNameError, match="a/b:1b-Q4_0, a/b:3b-Q4_0"):
        chosen(models, "Q4_0")
    assert chosen(models, "3B-q4_0") is models[1]


def test_without_a_quantization_it_is_q4_k_m_or_the_only_one() -> None:
    models = models_of("a/b", {"x-Q8_0.gguf": 1, "x-Q4_K_M.gguf": 1, "x-Q6_K.gguf": 1})
    assert chosen(models, None).tag == "Q4_K_M"
    with pytest.raises(ModelNameError, match=r"choose one of a/b:Q4_K_M, a/b:Q6_K, a/b:Q8_0"):
        chosen(models, None, usual=False)
    others = [model for model in models if model.tag != "Q4_K_M"]
    with pytest.raises(ModelNameError, match=r"choose one of a/b:Q6_K, a/b:Q8_0"):
        chosen(others, None)
    assert chosen(others[:1], None) is others[0]
    with pytest.raises(ModelNameError, match=r"has no Q5_0; it has a/b:Q4_K_M"):
        chosen(models, "Q5_0")
