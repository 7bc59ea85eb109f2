/** A conversation: a tree of messages of which one path is shown, and the answer that is being made. No elements. */

import { answer, Problem } from "./api.js";
import { fresh, write } from "./store.js";

const SAVED_MS = 1000; // how often an answer is kept while it comes
const SHORT_S = 0.05; // no speed is told of an answer that came within it
const TITLE = 60; // characters of the first message that make a title

export class Chat {
  /** `told(chat, message)` hears of each change: of a message that grew, or without one of anything else. */
  constructor(record, messages, told) {
    this.record = record;
    this.messages = new Map(messages.map((each) => [each.id, each]));
    this.told = told;
    this.kept = messages.length > 0;
    this.leaf = this.messages.has(record.leaf) ? record.leaf : this.newest("");
    this.job = null;
    this.problem = null;
  }

  /** A conversation that is kept once something is said. */
  static begin(settings, told) {
    const now = Date.now();
    return new Chat({ id: fresh(), title: "", created: now, updated: now, ...settings }, [], told);
  }

  get id() {
    return this.record.id;
  }

  /** What hangs on a message, in the order in which it was made. */
  children(parent) {
    return [...this.messages.values()].filter((each) => each.parent === parent).sort((a, b) => a.created - b.created);
  }

  /** The end of the newest branch below a message. */
  newest(id) {
    for (let below = this.children(id); below.length; below = this.children(id)) id = below.at(-1).id;
    return id;
  }

  /** The messages that are shown, the first one first. */
  get path() {
    const path = [];
    for (let at = this.messages.get(this.leaf); at; at = this.messages.get(at.parent)) path.push(at);
    return path.reverse();
  }

  /** Show the branch of a message. */
  choose(message) {
    this.leaf = this.newest(message.id);
    this.problem = null;
    this.save({ leaf: this.leaf });
    this.told(this);
  }

  /** Change fields of the record: title, model, system, thinking, sampling. */
  set(changes) {
    Object.assign(this.record, changes);
    if (this.kept) this.save(changes);
    this.told(this);
  }

  /** Take over what another tab has written. */
  merge(record, messages) {
    for (const each of messages) if (each.id !== this.job?.message.id) this.messages.set(each.id, each);
    this.record = record;
    if (!this.job) this.leaf = this.newest(this.leaf);
    this.told(this);
  }

  /** Say something after `parent`, which becomes what is shown. */
  say(role, content, parent = this.leaf) {
    const message = { id: fresh(), conversation: this.id, parent, role, content, created: Date.now() };
    this.messages.set(message.id, message);
    this.leaf = message.id;
    this.record.title ||= content.trim().split("\n")[0].slice(0, TITLE);
    return message;
  }

  /** Ask, at the end or instead of a message that was there, and have it answered. */
  ask(content, parent = this.leaf) {
    this.keep(this.say("user", content, parent));
    return this.answer();
  }

  /** Write an answer anew, as another branch. */
  rewrite(message, content) {
    const { model, finish } = message;
    this.keep(Object.assign(this.say("assistant", content, message.parent), { model, finish }));
    this.told(this);
  }

  /** Have the message `parent` answered, once more if it was already. */
  async answer(parent = this.leaf) {
    if (this.job) return;
    const asked = this.request(parent);
    const message = Object.assign(this.say("assistant", "", parent), { model: asked.model });
    const job = { message, control: new AbortController(), began: performance.now(), kept: true };
    [this.job, this.problem] = [job, null];
    const keeping = setInterval(() => {
      if (!job.kept) this.keep(message);
      job.kept = true;
    }, SAVED_MS);
    this.told(this);
    try {
      for await (const chunk of answer(asked, job.control.signal)) {
        this.take(job, chunk);
        this.told(this, message);
      }
      message.finish ??= "stop";
    } catch (error) {
      message.finish = job.control.signal.aborted ? "stopped" : "error";
      const problem = error instanceof Problem ? error : new Problem(`This page failed: ${error}.`, "Load it again.");
      if (message.finish === "error") this.problem = problem;
    }
    clearInterval(keeping);
    if (message.content || message.thinking || !["stopped", "error"].includes(message.finish)) {
      // Until it is on disk, what another tab deletes is not gone.
      await this.keep(message).finally(() => { this.job = null; });
    } else { // nothing came: no branch without words
      this.job = null;
      this.messages.delete(message.id);
      if (this.leaf === message.id) this.leaf = this.newest(parent);
    }
    this.told(this);
  }

  /** What the server is asked for. */
  request(parent) {
    const before = [];
    for (let at = this.messages.get(parent); at; at = this.messages.get(at.parent)) {
      if (at.content) before.unshift({ role: at.role, content: at.content });
    }
    const system = this.record.system?.trim() ? [{ role: "system", content: this.record.system }] : [];
    const { model, thinking, sampling } = this.record;
    const switched = thinking && { chat_template_kwargs: { enable_thinking: thinking === "on" } };
    return { model, messages: [...system, ...before], ...sampling, ...switched };
  }

  /** Take what came into the message of a job. */
  take(job, chunk) {
    const { message } = job;
    const [choice] = chunk.choices ?? [];
    const now = performance.now();
    const { content, reasoning_content: thinking } = choice?.delta ?? {};
    if (content || thinking) {
      job.first ??= now;
      job.last = now;
      job.kept = false;
      if (thinking) message.thinking = (message.thinking ?? "") + thinking;
      if (content) {
        if (message.thinking && !message.content) message.thought = (now - job.first) / 1000;
        message.content += content;
      }
      message.first ??= (now - job.began) / 1000;
    }
    if (choice?.finish_reason) message.finish = choice.finish_reason;
    message.tokens = chunk.usage?.completion_tokens ?? chunk.timings?.predicted_n ?? message.tokens;
    const passed = (job.last - job.first) / 1000;
    message.rate = chunk.timings?.predicted_per_second
      ?? (chunk.usage && passed > SHORT_S ? (message.tokens - 1) / passed : message.rate);
  }

  /** End the answer that is being made; what came of it stays. */
  stop() {
    this.job?.control.abort();
  }

  /** Keep nothing of it from now on, and end what is being made. */
  forget() {
    this.forgotten = true;
    this.stop();
  }

  /** Keep a message in the browser, and where the conversation is now. */
  keep(message) {
    this.kept = true;
    this.record.updated = Date.now();
    return this.save({ updated: this.record.updated, leaf: this.leaf }, message);
  }

  async save(changes, message) {
    if (!this.forgotten) await write(this, changes, message).catch((error) => this.told(this, null, error));
  }
}
