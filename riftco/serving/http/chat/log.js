// The log of messages. Whatever a person or the model wrote enters the document as text.

const GREETING = "Say something, and the model will go on from there.";
const NOTHING = "(the model answered with nothing visible)";
const NEAR = 48; // pixels from its end within which the log follows what is written

class MessageLog {
  #log;
  #main;
  #end;
  #horizon = make("p", "horizon", "The model no longer reads what is above.");

  constructor({log, main, end}) {
    this.#log = log;
    this.#main = main;
    this.#end = end;
    this.#holdEnd();
  }

  /** Where the end was in view it stays so when the settings open and take room. */
  #holdEnd() {
    const main = this.#main;
    let held = true;
    main.addEventListener("scroll", () => {
      held = main.scrollHeight - main.scrollTop - main.clientHeight < NEAR;
    });
    new ResizeObserver(() => {
      if (held) main.scrollTop = main.scrollHeight;
    }).observe(main);
  }

  greet() {
    this.#log.replaceChildren(make("p", "greeting", GREETING));
  }

  user(text) {
    this.#log.querySelector(".greeting")?.remove();
    return this.show("user", "You", text);
  }

  show(kind, speaker, text) {
    const message = make("div", `message ${kind}`);
    const body = make("div", "text", text);
    body.dir = "auto";
    message.append(make("span", "hidden", `${speaker}: `), body);
    this.append(message);
    return message;
  }

  append(message) {
    this.#log.append(message);
    this.#end.scrollIntoView({block: "nearest"});
  }

  /** An error in place of an answer, with a way to ask again where that may help. */
  failure(message, again) {
    const shown = this.show("error", "Error", message);
    if (!again) return;
    const button = make("button", "quiet", "Ask again");
    button.type = "button";
    button.addEventListener("click", () => again(shown));
    shown.append(button);
  }

  /** Change the log, and stay at its end if that is where the reader was. */
  following(change) {
    const bottom = Math.min(this.#main.getBoundingClientRect().bottom, innerHeight);
    const reading = this.#end.getBoundingClientRect().top > bottom + NEAR;
    change();
    if (!reading) this.#end.scrollIntoView({block: "nearest"});
  }

  /** Mark where what the model reads begins: before this message, or nowhere. */
  horizon(message) {
    if (message) message.before(this.#horizon);
    else this.#horizon.remove();
  }
}

/** One answer of the model as it arrives; frames of the display, not events, pace the changes. */
class Answer {
  #log;
  #inspector;
  #message = make("div", "message model streaming");
  #body = make("div", "text", "");
  #alignment = new Alignment();
  #names = new Map(); // token id -> text, for alternatives that come without theirs
  #events = [];
  #frame = 0;

  constructor(log, inspector) {
    this.#log = log;
    this.#inspector = inspector;
    this.#body.dir = "auto";
    this.#body.setAttribute("aria-live", "off"); // the finished answer is announced, not each of its tokens
    this.#message.append(make("span", "hidden", "Model: "), this.#body);
    log.append(this.#message);
  }

  get text() {
    return this.#body.textContent;
  }

  add(event) {
    this.#events.push(event);
    this.#frame ||= requestAnimationFrame(() => this.#flush());
  }

  /** Nothing more comes. `remarks` go under the answer; without text and remarks nothing of it stays. */
  finish(remarks) {
    cancelAnimationFrame(this.#frame);
    this.#flush();
    this.#message.classList.remove("streaming");
    this.#log.following(() => {
      this.#trimEnd();
      if (!this.text && !remarks.length) this.#message.remove();
      else if (!this.text) this.#body.replaceWith(make("div", "text empty", NOTHING));
      if (remarks.length) this.#message.append(make("p", "meta", remarks.join(" \u00b7 ")));
    });
  }

  #flush() {
    this.#frame = 0;
    if (!this.#events.length) return;
    this.#log.following(() => this.#events.splice(0).forEach((event) => this.#write(event)));
  }

  #write({text = "", token_ids: ids = [], tokens = [], logprobs = []}) {
    tokens.forEach((name, index) => this.#names.set(ids[index], name));
    const known = logprobs.map((entry, index) => this.#token(entry, tokens[index]));
    for (const segment of this.#alignment.add(text, known)) this.#piece(segment);
  }

  #token({token_id: id, logprob, top}, text = "") {
    const name = (other) => this.#names.get(other) ?? `#${other}`;
    const rows = top.map(([other, value, given = name(other)]) => ({id: other, logprob: value, text: given}));
    return {id, text, logprob, top: rows};
  }

  #piece({text, tokens}) {
    const shown = this.#body.hasChildNodes() ? text : text.trimStart();
    if (!shown) return;
    const element = make("span", "", shown);
    this.#body.append(element);
    if (!tokens.length) return;
    element.className = "token";
    this.#inspector.register(element, tokens);
    if (!this.#body.hasAttribute("tabindex")) this.#makeWalkable();
  }

  #trimEnd() {
    let last = this.#body.lastChild;
    while (last && !last.textContent.trim()) {
      last.remove();
      last = this.#body.lastChild;
    }
    if (last) last.textContent = last.textContent.trimEnd();
  }

  #makeWalkable() {
    this.#body.tabIndex = 0;
    this.#body.setAttribute("role", "group");
    this.#body.setAttribute("aria-label", "Answer; arrow keys show how likely each token was");
    this.#inspector.walk(this.#body);
  }
}
