/** How a conversation is shown: an article for each message, kept as long as what it shows is the same. */

import { $, button, copier, el, say } from "./dom.js";
import { show } from "./markdown.js";

const ENDS = {
  length: "The answer reached its limit of tokens, or the end of the context.",
  stopped: "Stopped.",
  error: "An error ended the answer.",
  content_filter: "The server ended the answer.",
};

/** Show all of a conversation. `act` has what the buttons do: {edit, regenerate, choose}. */
export function draw(chat, act) {
  const path = chat.path;
  const old = new Map([...$("messages").children].map((node) => [node.dataset.id, node]));
  const nodes = path.map((message) => {
    const node = old.get(message.id) ?? article(message);
    fill(node, chat, message);
    const siblings = chat.children(message.parent);
    const key = JSON.stringify([Boolean(chat.job), siblings.map((each) => each.id)]);
    if (node.row !== key) {
      node.row = key;
      const row = actions(chat, message, siblings, act, node);
      row.hidden = Boolean(node.querySelector(".editing"));
      node.lastChild.replaceWith(row);
    }
    return node;
  });
  const last = path.at(-1);
  if (last?.role === "user" && !chat.job) {
    nodes.push(el("div", { class: "actions" }, button("Answer", () => act.regenerate(last))));
  }
  if (nodes.some((node, at) => node !== $("messages").children[at]) || nodes.length < $("messages").children.length) {
    $("messages").replaceChildren(...nodes);
  }
  $("empty").hidden = nodes.length > 0;
}

/** Show what came of the message that is being made. */
export function grow(chat, message) {
  const node = [...$("messages").children].find((each) => each.dataset.id === message.id);
  if (node) fill(node, chat, message);
}

function article(message) {
  const mine = message.role === "user";
  return el("article", { class: message.role, "data-id": message.id },
    el("h3", { class: mine ? "hidden" : "who" }, mine ? "You" : message.model || "Answer"),
    mine ? [] : el("details", { class: "thinking", hidden: "" }, el("summary"), el("div", { class: "text" })),
    el("div", { class: "text body" }),
    el("p", { class: "note", hidden: "" }),
    el("div"));
}

/** Put a message's texts where they belong. */
function fill(node, chat, message) {
  const body = node.querySelector(".body");
  const running = chat.job?.message === message;
  const key = JSON.stringify([message, running]);
  if (node.made === key) return;
  node.made = key;
  if (message.role === "user") {
    body.textContent = message.content;
    return;
  }
  node.setAttribute("aria-busy", String(running));
  show(message.content, body);
  const thinking = node.querySelector(".thinking");
  thinking.hidden = !message.thinking;
  if (message.thinking) {
    const ended = message.content || !running;
    const seconds = message.thought === undefined ? "" : ` for ${message.thought.toFixed(1)} s`;
    thinking.firstChild.textContent = ended ? `Thought${seconds}` : "Thinking …";
    show(message.thinking, thinking.lastChild);
  }
  const note = node.querySelector(".note");
  const waits = running && !message.content && !message.thinking;
  note.textContent = waits ? "Waiting for the first token …" : told(message, running);
  note.hidden = !note.textContent;
}

/** What is known of an answer besides its text. */
function told(message, running) {
  const facts = [];
  if (!running) facts.push(message.finish ? ENDS[message.finish] : "Not finished.");
  if (message.tokens) facts.push(`${message.tokens} token${message.tokens === 1 ? "" : "s"}`);
  if (message.rate > 0) facts.push(`${message.rate.toFixed(1)} tokens/s`);
  if (message.first !== undefined && !running) facts.push(`first after ${message.first.toFixed(2)} s`);
  return facts.filter(Boolean).join(" · ");
}

function actions(chat, message, siblings, act, node) {
  const row = el("div", { class: "actions" });
  if (chat.job?.message.id === message.id) return row;
  row.append(copier(() => message.content));
  if (chat.job) return row;
  row.append(button("Edit", () => edit(message, act, node)));
  if (message.role === "assistant") {
    row.append(button("Regenerate", () => act.regenerate(chat.messages.get(message.parent))));
  }
  if (siblings.length > 1) {
    const at = siblings.findIndex((each) => each.id === message.id);
    const turn = (text, label, to) =>
      button(text, () => act.choose(to), { "aria-label": label, disabled: to ? undefined : "" });
    row.append(el("span", { class: "versions" }, turn("‹", "Version before", siblings[at - 1]),
      `${at + 1} of ${siblings.length}`, turn("›", "Version after", siblings[at + 1])));
  }
  return row;
}

/** Have a message's text edited in its place. */
function edit(message, act, node) {
  const mine = message.role === "user";
  const field = el("textarea", { "aria-label": mine ? "Edit your message" : "Edit the answer", rows: "4" });
  field.value = message.content;
  const hide = (hidden) => {
    for (const name of [".body", ".actions"]) node.querySelector(name).hidden = hidden;
  };
  const leave = () => {
    form.remove();
    hide(false);
  };
  const form = el("form", { class: "editing", onsubmit: (event) => {
    event.preventDefault();
    leave();
    if (field.value.trim() && field.value !== message.content) act.edit(message, field.value);
  } }, field, el("div", { class: "row end" },
    button("Cancel", () => {
      leave();
      [...node.lastChild.children].find((each) => each.textContent === "Edit")?.focus();
    }),
    el("button", { type: "submit", class: "strong" }, mine ? "Send edit" : "Save edit")));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      form.querySelector("button").click();
    }
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  hide(true);
  node.querySelector(".body").after(form);
  field.focus();
}

/** Says an answer to screen readers as it comes: whole sentences, each once. */
export class Speaker {
  constructor(chat) {
    this.chat = chat;
    this.said = 0;
    say("");
    say("Answering.");
  }

  /** Hear what there is of the answer, and whether that is all. */
  hear(message, ended) {
    const rest = message.content.slice(this.said);
    const end = ended ? rest.length : Math.max(...["\n", ". ", "! ", "? "].map((mark) => rest.lastIndexOf(mark))) + 1;
    if (rest.slice(0, end).trim()) say(rest.slice(0, end).trim());
    this.said += end;
  }
}
