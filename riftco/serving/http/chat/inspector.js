// The card that shows how likely a token was and what else the model would have said: on hover, on a tap, and
// by arrow keys within an answer that has the focus.

const HIDE_DELAY = 150; // milliseconds in which the pointer may move from the token to the card
const GAP = 6; // pixels between a token and the card
const LONGEST = 32; // characters of a token that the card shows

const make = (tag, className = "", text = "") => {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  return element;
};

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  if (share > 0 && share < 0.1) return "<0.1 %";
  return `${share > 99.95 ? 100 : share.toFixed(1)} %`;
};

/** Text with its white space made visible. */
const MARKS = {" ": "\u00b7", "\n": "\u21b5", "\t": "\u21e5", "\r": "\u240d"};
const visible = (text) => cut(text).replace(/[ \n\t\r]/g, (space) => MARKS[space]);
const cut = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}\u2026` : text);
const spoken = (text) => text.trim() || visible(text);

/** One visible piece of an answer: its element, and the tokens `{id, text, logprob, top}` that wrote it. */
class Piece {
  constructor(element, tokens) {
    this.element = element;
    this.tokens = tokens;
    this.logprob = tokens.reduce((sum, token) => sum + token.logprob, 0);
  }

  /** Rows `{id, text, logprob, chosen}`, likeliest first; none for several tokens. */
  rows() {
    if (this.tokens.length !== 1) return [];
    const [{id, text, logprob, top}] = this.tokens;
    const rows = top.map((row) => ({...row, chosen: row.id === id}));
    if (!rows.some((row) => row.chosen)) rows.push({id, text, logprob, chosen: true});
    return rows;
  }

  spoken() {
    const others = this.rows().filter((row) => !row.chosen);
    const named = others.map((row) => `${spoken(row.text)} ${percent(row.logprob)}`);
    const own = `${spoken(this.element.textContent)}: ${percent(this.logprob)}`;
    return named.length ? `${own}. Otherwise: ${named.join(", ")}` : own;
  }
}

class Inspector {
  #card;
  #announce;
  #pieces = new WeakMap(); // element -> Piece
  #shown = null;
  #hiding = 0;

  constructor(card, log, announce) {
    this.#card = card;
    this.#announce = announce;
    log.addEventListener("pointerover", (event) => this.#hover(this.#pieceAt(event)));
    log.addEventListener("pointerleave", () => this.#hideSoon());
    card.addEventListener("pointerenter", () => clearTimeout(this.#hiding));
    card.addEventListener("pointerleave", () => this.#hideSoon());
    document.addEventListener("pointerdown", (event) => {
      if (!card.contains(event.target) && !this.#pieceAt(event)) this.hide();
    });
    addEventListener("scroll", () => this.#place(), {capture: true, passive: true});
    addEventListener("resize", () => this.#place());
  }

  get open() {
    return this.#shown !== null;
  }

  /** From now on this piece of text shows its tokens. */
  register(element, tokens) {
    const piece = new Piece(element, tokens);
    this.#pieces.set(element, piece);
    element.style.setProperty("--doubt", Math.min(1, -piece.logprob / 4).toFixed(2));
  }

  /** Let arrow keys walk over the tokens of an answer, one tab stop for all of them. */
  walk(answer) {
    let index = 0;
    const show = (wanted) => {
      const tokens = answer.querySelectorAll(".token");
      index = Math.max(0, Math.min(tokens.length - 1, wanted));
      tokens[index].scrollIntoView({block: "nearest"});
      this.#show(this.#pieces.get(tokens[index]));
      this.#announce(this.#shown.spoken());
    };
    const moves = {
      ArrowRight: () => index + 1,
      ArrowLeft: () => index - 1,
      Home: () => 0,
      End: () => Infinity,
    };
    answer.addEventListener("focus", () => {
      if (answer.matches(":focus-visible")) show(index);
    });
    answer.addEventListener("blur", () => this.hide());
    answer.addEventListener("keydown", (event) => {
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(this.open ? moves[event.key]() : index);
    });
  }

  hide() {
    clearTimeout(this.#hiding);
    this.#shown?.element.classList.remove("current");
    this.#shown = null;
    this.#card.hidden = true;
  }

  #pieceAt(event) {
    return event.target instanceof Element ? this.#pieces.get(event.target) : undefined;
  }

  #hover(piece) {
    clearTimeout(this.#hiding);
    if (piece) this.#show(piece);
    else this.#hideSoon();
  }

  #hideSoon() {
    clearTimeout(this.#hiding);
    this.#hiding = setTimeout(() => this.hide(), HIDE_DELAY);
  }

  #show(piece) {
    this.hide();
    this.#shown = piece;
    piece.element.classList.add("current");
    const rows = piece.rows();
    this.#card.replaceChildren(rows.length > 1 ? table(rows) : alone(piece));
    this.#card.hidden = false;
    this.#place();
  }

  /** Below the token, or above it where there is no room. */
  #place() {
    if (!this.#shown) return;
    const token = this.#shown.element.getClientRects()[0];
    const card = this.#card.getBoundingClientRect();
    const below = token.bottom + GAP;
    const top = below + card.height > innerHeight ? token.top - GAP - card.height : below;
    const left = Math.min(token.left, document.documentElement.clientWidth - card.width - GAP);
    this.#card.style.top = `${Math.max(GAP, top)}px`;
    this.#card.style.left = `${Math.max(GAP, left)}px`;
  }
}

/** What can be said of a piece without alternatives. */
function alone(piece) {
  const element = make("p", "alone");
  const text = visible(piece.element.textContent);
  element.append(make("code", "", text), make("span", "", percent(piece.logprob)));
  if (piece.tokens.length > 1) element.append(make("small", "", `written by ${piece.tokens.length} tokens`));
  return element;
}

function table(rows) {
  const element = make("table");
  element.append(make("caption", "hidden", "What the model found likeliest here"));
  for (const row of rows) {
    const line = make("tr", row.chosen ? "chosen" : "");
    const name = make("th");
    name.scope = "row";
    name.append(make("code", "", visible(row.text)));
    const bar = make("td", "bar");
    bar.style.setProperty("--share", Math.exp(row.logprob).toFixed(4));
    line.append(name, bar, make("td", "share", percent(row.logprob)));
    element.append(line);
  }
  return element;
}
