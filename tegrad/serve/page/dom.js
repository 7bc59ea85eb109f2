/** Making elements, asking and telling the user, keeping texts: what all other modules use of the browser. */

const unkept = new Map();

/** Texts by name that outlive the page, if the browser keeps anything at all. */
export const kept = {
  get(name) {
    try {
      return localStorage.getItem(name);
    } catch {
      return unkept.get(name) ?? null;
    }
  },
  set(name, text) {
    try {
      localStorage.setItem(name, text);
    } catch {
      unkept.set(name, text);
    }
  },
};

/** An element by its id. */
export const $ = (id) => document.getElementById(id);

/** A new element of texts, nodes and arrays of these. Properties are attributes; listeners, if they begin with "on". */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) node.append(child);
  return node;
}

/** A button with a text. */
export const button = (text, onclick, more = {}) => el("button", { type: "button", onclick, ...more }, text);

/** Have screen readers say a text when they are free; nothing that is seen. An empty one forgets what was said. */
export function say(text) {
  if (text) $("said").append(el("p", {}, text));
  else $("said").replaceChildren();
}

/** Put a text on the clipboard; also where the page came without TLS from another machine. */
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const focused = document.activeElement;
  const area = el("textarea", { "aria-hidden": "true", class: "hidden" });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!copied) throw new Error("the browser refused");
}

/** A button that copies what `text()` returns, and says so. */
export function copier(text, label = "Copy") {
  const node = button(label, async () => {
    const told = await copy(text()).then(() => "Copied", () => "Not copied");
    node.textContent = told;
    say(told);
    setTimeout(() => { node.textContent = label; }, 1500);
  });
  return node;
}

/** Tell of an error, with its cause, what to do, and a button that does it, until it is closed. */
export function notice(cause, next, action) {
  const box = el("div", { class: "notice" }, el("p", {}, el("strong", {}, cause), ` ${next}`));
  if (action) box.append(button(action.label, () => { box.remove(); action.run(); }));
  box.append(button("Close", () => { box.remove(); $("question").focus(); }));
  $("notices").replaceChildren(box);
}

/** Ask in a dialog. With an `input` ({label, type, value}) its text comes back, else ""; null if the user cancels. */
export function ask(title, text, yes, input) {
  const field = input && el("input", { id: "asked", type: input.type ?? "text", autocomplete: "off" });
  if (field) field.value = input.value ?? "";
  const dialog = el("dialog", { "aria-labelledby": "ask-title" }, el("form", { method: "dialog" },
    el("h2", { id: "ask-title" }, title),
    el("p", {}, text),
    field ? [el("label", { for: "asked" }, input.label), field] : [],
    el("div", { class: "row end" },
      button("Cancel", () => dialog.close("cancel")),
      el("button", { type: "submit", value: "ok", class: "strong" }, yes))));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((resolve) => dialog.addEventListener("close", () => {
    dialog.remove();
    resolve(dialog.returnValue === "ok" ? field?.value ?? "" : null);
  }));
}

/** Have the browser save a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
