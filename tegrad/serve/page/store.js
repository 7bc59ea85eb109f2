/** Conversations kept in the browser, in IndexedDB, where several tabs may write.
 *
 * A conversation is a record and messages that name their parent: a tree. Messages are only ever added, or grow, so
 * that tabs which write to the same conversation make branches of it, and neither loses what the other wrote.
 */

const FORMAT = "tegrad-conversations";
const channel = new BroadcastChannel("tegrad");
let database;

/** A new id. Also works where the page came without TLS, where there is no crypto.randomUUID. */
export const fresh = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(36)).join("");

/** Be told of the conversation that another tab has changed. */
export const onchange = (listener) => channel.addEventListener("message", (event) => listener(event.data));

const settled = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function opened() {
  database ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("tegrad", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    settled(request).then(resolve, reject);
  });
  return database;
}

/** `work(conversations, messages)` in one transaction, after which it is on disk. */
async function within(mode, work) {
  const transaction = (await opened()).transaction(["conversations", "messages"], mode);
  const done = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  done.catch(() => {}); // told below, unless the work itself has failed
  const result = await work(transaction.objectStore("conversations"), transaction.objectStore("messages"));
  await done;
  return result;
}

/** All conversations, the one that was used last first. */
export async function conversations() {
  const all = await within("readonly", (records) => settled(records.getAll()));
  return all.sort((a, b) => b.updated - a.updated);
}

/** A conversation and its messages; the record is undefined where there is none. */
export const read = (id) => within("readonly", async (records, messages) => [
  await settled(records.get(id)),
  await settled(messages.index("conversation").getAll(id)),
]);

/** Write what changed of a conversation: fields of its record, and a message. All of it, if another tab deleted it. */
export async function write(chat, changes, message) {
  await within("readwrite", async (records, messages) => {
    const known = await settled(records.get(chat.id));
    records.put({ ...(known ?? chat.record), ...changes });
    for (const each of known ? [message] : chat.messages.values()) if (each) messages.put(each);
  });
  channel.postMessage(chat.id);
}

/** Forget a conversation. */
export async function remove(id) {
  await within("readwrite", async (records, messages) => {
    records.delete(id);
    for (const each of await settled(messages.index("conversation").getAllKeys(id))) messages.delete(each);
  });
  channel.postMessage(id);
}

/** A file's text of one conversation, or of all. */
export async function exported(id) {
  const [records, messages] = await within("readonly", async (records, messages) => id
    ? [[await settled(records.get(id))], await settled(messages.index("conversation").getAll(id))]
    : [await settled(records.getAll()), await settled(messages.getAll())]);
  return JSON.stringify({ format: FORMAT, version: 1, conversations: records, messages }, null, 1);
}

const text = (value) => (typeof value === "string" ? value : undefined);
const number = (value) => (Number.isFinite(value) ? value : undefined);
const RECORD = {
  id: text, title: text, created: number, updated: number, model: text, system: text, thinking: text, leaf: text,
};
const MESSAGE = {
  id: text, conversation: text, parent: text, role: text, content: text, thinking: text, created: number, model: text,
  finish: text, tokens: number, first: number, rate: number, thought: number,
};

/** Of an object in a file, the fields that are known and sound. */
const sound = (object, fields) => {
  const checked = Object.entries(fields).map(([name, check]) => [name, check(object?.[name])]);
  return Object.fromEntries(checked.filter(([, value]) => value !== undefined));
};

/** Take the conversations of a file; what is there already stays as it is. Returns how many conversations it had. */
export async function imported(file) {
  let data;
  try {
    data = JSON.parse(file);
  } catch {
    data = null;
  }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations) || !Array.isArray(data.messages)) {
    throw new Error("This is not a file of conversations that this page has exported.");
  }
  const finite = ([, value]) => Number.isFinite(value);
  const numbers = (given) => Object.fromEntries(Object.entries(given ?? {}).filter(finite));
  const records = data.conversations
    .map((each) => ({ title: "", created: 0, updated: 0, ...sound(each, RECORD), sampling: numbers(each?.sampling) }))
    .filter((each) => each.id);
  const messages = data.messages
    .map((each) => ({ parent: "", content: "", created: 0, ...sound(each, MESSAGE) }))
    .filter((each) => each.id && ["user", "assistant"].includes(each.role));
  await within("readwrite", async (kept, keptMessages) => {
    for (const record of records) {
      if (!(await settled(kept.get(record.id)))) kept.put(record);
      const there = await settled(keptMessages.index("conversation").getAll(record.id));
      const reached = new Set(["", ...there.map((each) => each.id)]);
      let waiting = messages.filter((each) => each.conversation === record.id);
      for (let before = Infinity; waiting.length < before;) { // parents first: what hangs on nothing is left out
        before = waiting.length;
        const next = [];
        for (const message of waiting) {
          if (!reached.has(message.parent)) next.push(message);
          else if (!reached.has(message.id) && !(await settled(keptMessages.get(message.id)))) {
            keptMessages.put(message);
            reached.add(message.id);
          }
        }
        waiting = next;
      }
    }
  });
  for (const record of records) channel.postMessage(record.id);
  return records.length;
}
