/** The page: which conversation is shown, and what buttons and keys do. */

import { key, models } from "./api.js";
import { Chat } from "./chat.js";
import { $, ask, button, download, el, notice, say } from "./dom.js";
import * as settings from "./settings.js";
import * as store from "./store.js";
import { draw, grow, Speaker } from "./view.js";

const NARROW = matchMedia("(max-width: 48rem)");
const TOUCH = matchMedia("(pointer: coarse)");
const NEAR = 80; // pixels from the end of the log within which it is followed
const chats = new Map(); // those of which an answer is being made, and the one that is shown
let chat;
let offered = [];
let speaker = null;
let frame = 0;
let warned = false;

// ---- what is shown

/** Hear of a change of any conversation. */
function told(changed, message, error) {
  if (error) {
    if (warned) return;
    warned = true;
    notice("The browser could not keep what was said.", `Copy it before this page closes (${error.message}).`);
  } else if (changed !== chat) {
    if (!changed.job) chats.delete(changed.id);
  } else if (message) {
    if (speaker?.chat === chat) speaker.hear(message, false);
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      follow(() => grow(chat, message));
    });
  } else {
    refresh();
  }
}

/** Show the conversation as it is now. */
function refresh() {
  const running = Boolean(chat.job);
  follow(() => draw(chat, act));
  $("title").textContent = chat.record.title || "New conversation";
  document.title = chat.record.title ? `${chat.record.title} · tegrad` : "tegrad";
  $("about").hidden = !chat.kept;
  $("send").hidden = running;
  $("stop").hidden = !running;
  if (document.activeElement === document.body && document.hasFocus()) home(); // what had the focus is gone
  if (chat.problem) trouble(chat.problem);
  pick();
}

/** Tell of what kept an answer from coming, once. */
function trouble(problem) {
  chat.problem = null;
  const last = chat.path.at(-1);
  const from = last?.role === "user" ? last : chat.messages.get(last?.parent);
  const again = () => act.regenerate(from);
  if (problem.status === 401) wanted(problem, again);
  else notice(problem.message, problem.next, { label: "Try again", run: again });
}

/** Have the focus where the next message is written, without calling up a keyboard on a screen that is touched. */
const home = () => (TOUCH.matches ? $("log") : $("question")).focus();

/** Change what the log shows, which stays at its end if it was there. */
function follow(change) {
  const log = $("log");
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
  change();
  if (near) log.scrollTop = log.scrollHeight;
  latest();
}

function latest() {
  const log = $("log");
  $("latest").hidden = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
}

/** Show a conversation by its id, or a new one. */
async function open(id) {
  let opened = chats.get(id);
  if (!opened) {
    const [record, messages] = id ? await store.read(id).catch(() => []) : [];
    opened = record ? new Chat(record, messages, told) : Chat.begin(settings.defaults(), told);
  }
  if (chat && !chat.job) chats.delete(chat.id);
  chat = opened;
  chats.set(chat.id, chat);
  $("notices").replaceChildren();
  refresh();
  $("log").scrollTop = $("log").scrollHeight;
  address(chat.kept ? chat.id : "");
  list();
}

/** Have the page's address name the conversation, so that a reload and other tabs find it. */
function address(id) {
  const hash = id ? `#c=${id}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname + location.search);
}

const named = () => /^#c=(\w+)$/.exec(location.hash)?.[1] ?? "";

/** List the conversations. */
async function list() {
  const records = await store.conversations().catch((error) => {
    notice("The browser keeps no conversations.", `They are lost when this page is closed (${error.message}).`);
    return [];
  });
  const rows = records.map(({ id, title }) => [id, title || "Without words", id === chat.id ? "page" : undefined]);
  const key = JSON.stringify(rows);
  if ($("conversations").made === key) return;
  $("conversations").made = key;
  const there = document.activeElement?.closest("#conversations a")?.hash; // whoever is in the list stays there
  const links = rows.map(([id, title, current]) => el("a", { href: `#c=${id}`, "aria-current": current }, title));
  $("conversations").replaceChildren(...links.map((link) => el("li", {}, link)));
  links.find((link) => link.hash === there)?.focus();
}

// ---- what is asked

/** What the buttons of a message do. */
const act = {
  regenerate: (message) => answering(chat.answer(message?.id ?? "")),
  choose(message) {
    chat.choose(message);
  },
  edit(message, text) {
    if (message.role === "user") answering(chat.ask(text, message.parent));
    else chat.rewrite(message, text);
  },
};

/** Go along with an answer from its begin to its end. */
async function answering(done) {
  const asked = chat;
  speaker = new Speaker(asked);
  const mine = speaker;
  $("notices").replaceChildren();
  $("log").scrollTop = $("log").scrollHeight;
  if (named() !== asked.id) address(asked.id);
  await done;
  const last = asked.path.at(-1);
  if (asked === chat && speaker === mine && last?.role === "assistant") mine.hear(last, true);
  list();
}

function send() {
  const text = $("question").value;
  if (!text.trim() || chat.job) return;
  $("question").value = "";
  size();
  answering(chat.ask(text));
}

/** Say so where something was pasted or dropped that is no text, before the browser does what it likes with it. */
function reject(event, { types }) {
  if (!types.includes("Files") || types.includes("text/plain")) return;
  event.preventDefault();
  const name = chat.record.model ?? "The model";
  if (event.type !== "dragover") notice("Pictures and files cannot be sent.", `${name} reads text alone.`);
}

/** Let the message box be as high as its text. */
function size() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

// ---- models and keys

/** Ask the server for its models, and the user for a key if it wants one. */
async function load() {
  try {
    offered = await models();
    if (!offered.length) notice("The server has no model.", "Get one with `tegrad pull`, then load this page again.");
  } catch (error) {
    if (error.status === 401) await wanted(error, load);
    else notice(error.message, error.next, { label: "Try again", run: load });
  }
  pick();
}

/** Show which models there are, and the conversation's. */
function pick() {
  const ids = offered.map((model) => model.id);
  const wanted = [chat.record.model, settings.defaults().model].find((id) => ids.includes(id)) ?? ids[0];
  if (wanted) chat.record.model = wanted;
  if ($("model").dataset.ids !== ids.join("\n")) {
    $("model").replaceChildren(...ids.map((id) => el("option", { value: id }, id)));
    $("model").dataset.ids = ids.join("\n");
  }
  $("model").value = chat.record.model ?? "";
}

/** Ask for the key that the server wants, then do what failed without it. */
async function wanted(problem, again) {
  const about = `${problem.message} The key is kept in this browser.`;
  const given = await ask("The server wants a key", about, "Use this key", { label: "API key", type: "password" });
  if (given === null) {
    notice(problem.message, problem.next, { label: "Give a key", run: () => wanted(problem, again) });
    return;
  }
  key.set(given.trim());
  if (!offered.length && again !== load) await load();
  await again();
}

// ---- buttons and keys

/** What comes once a conversation was chosen: narrow windows show it instead of the list. */
function chosen() {
  if (NARROW.matches) side(false);
  home();
}

/** Open or close the list of conversations. */
function side(opened) {
  document.body.classList.toggle("side", opened);
  $("menu").setAttribute("aria-expanded", String(opened));
  if (NARROW.matches && opened) $("new").focus();
}

const BUTTONS = {
  menu: () => side(!document.body.classList.contains("side")),
  async new() {
    await open("");
    chosen();
  },
  stop: () => chat.stop(),
  latest() {
    $("log").scrollTop = $("log").scrollHeight;
    home();
  },
  "open-settings": () => settings.open(chat, load),
  import: () => $("file").click(),
  "export-all": async () => download("tegrad-conversations.json", await store.exported()),
  export: async () => download("tegrad-conversation.json", await store.exported(chat.id)),
  async rename() {
    const title = await ask("Rename", "", "Rename", { label: "Name of the conversation", value: chat.record.title });
    if (!title?.trim()) return;
    chat.set({ title: title.trim() });
    list();
  },
  async delete() {
    if (await ask("Delete", `“${chat.record.title}” will be gone from this browser.`, "Delete") === null) return;
    const gone = chat;
    gone.forget();
    chats.delete(gone.id);
    await store.remove(gone.id); // what is shown as gone is gone, should the page be left now
    await open("");
    list();
    say("Deleted.");
    $("question").focus();
  },
};

async function take(file) {
  try {
    const count = await store.imported(await file.text());
    say(`${count} conversations imported.`);
  } catch (error) {
    notice("The file could not be imported.", error.message);
  }
  list();
}

function listen() {
  for (const [id, pressed] of Object.entries(BUTTONS)) $(id).addEventListener("click", pressed);
  const instead = (of, work) => {
    of.preventDefault();
    work();
  };
  $("skip").addEventListener("click", (event) => instead(event, () => $("question").focus()));
  $("conversations").addEventListener("click", chosen);
  $("file").addEventListener("change", () => {
    if ($("file").files[0]) take($("file").files[0]);
    $("file").value = "";
  });
  $("model").addEventListener("change", () => {
    chat.set({ model: $("model").value });
    settings.keep({ model: $("model").value });
  });
  $("log").addEventListener("scroll", latest);
  $("composer").addEventListener("submit", (event) => instead(event, send));
  $("question").addEventListener("input", size);
  addEventListener("paste", (event) => reject(event, event.clipboardData));
  for (const kind of ["dragover", "drop"]) addEventListener(kind, (event) => reject(event, event.dataTransfer));
  $("question").addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !TOUCH.matches;
    if (sends) instead(event, send);
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (NARROW.matches && document.body.classList.contains("side")) {
      side(false);
      $("menu").focus();
    } else {
      chat.stop();
    }
  });
  addEventListener("popstate", () => { if (named() !== (chat.kept ? chat.id : "")) open(named()); });
  store.onchange(async (id) => {
    list();
    if (id !== chat.id) return;
    const { job } = chat;
    const [record, messages] = await store.read(id);
    if (record) chat.merge(record, messages);
    else if (!job && !chat.job) {
      await open("");
      notice("This conversation was deleted in another tab.", "A new one begins here.");
    }
  });
}

settings.prepare();
listen();
side(!NARROW.matches);
await open(named());
home();
await load();
