/** What a conversation is asked with, and what this browser keeps of it: the dialog, and the settings of new ones. */

import { key } from "./api.js";
import { $, el, kept } from "./dom.js";

const SAMPLING = [ // within the bounds that the server has
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.01 }],
  ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }],
  ["top_k", "Top k", { min: 0, max: 1e6, step: 1 }],
  ["min_p", "Min p", { min: 0, max: 1, step: 0.001 }],
  ["presence_penalty", "Presence penalty", { min: -2, max: 2, step: 0.01 }],
  ["frequency_penalty", "Frequency penalty", { min: -2, max: 2, step: 0.01 }],
  ["repeat_penalty", "Repeat penalty", { min: 0.01, max: 100, step: 0.01 }],
  ["seed", "Seed", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }],
  ["max_tokens", "Max tokens", { min: 1, max: 1e6, step: 1 }],
];
const KEPT = "tegrad.defaults";

/** What a new conversation begins with: {model, system, thinking, sampling}. */
export function defaults() {
  try {
    return { system: "", sampling: {}, ...JSON.parse(kept.get(KEPT)) };
  } catch {
    return { system: "", sampling: {} };
  }
}

/** Change what new conversations begin with. */
export const keep = (changes) => kept.set(KEPT, JSON.stringify({ ...defaults(), ...changes }));

/** Make the dialog's fields. */
export function prepare() {
  $("sampling").append(...SAMPLING.map(([name, label, bounds]) => el("div", {},
    el("label", { for: name }, label),
    el("input", { id: name, type: "number", inputmode: "decimal", ...bounds }))));
}

/** Have the user change a conversation's settings; `changed` hears of it, unless the dialog was left. */
export function open(chat, changed) {
  $("system").value = chat.record.system ?? "";
  $("thinking").value = chat.record.thinking ?? "";
  for (const [name] of SAMPLING) $(name).value = chat.record.sampling?.[name] ?? "";
  $("default").checked = false;
  $("theme").value = document.documentElement.dataset.theme;
  $("key").value = key.get();
  const dialog = $("settings");
  dialog.showModal();
  dialog.querySelector("form").onsubmit = ({ submitter }) => { // a dialog's close event may come after the next keys
    if (submitter?.value !== "ok") return;
    const filled = SAMPLING.filter(([name]) => $(name).value !== "");
    const sampling = Object.fromEntries(filled.map(([name]) => [name, Number($(name).value)]));
    const chosen = { system: $("system").value, thinking: $("thinking").value, sampling };
    chat.set(chosen);
    if ($("default").checked) keep(chosen);
    document.documentElement.dataset.theme = $("theme").value;
    kept.set("tegrad.theme", $("theme").value);
    key.set($("key").value.trim());
    changed();
  };
}
