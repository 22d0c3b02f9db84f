// Which tokens wrote which part of a streamed text. The text is what counts: it comes complete in characters
// and without stop strings, so it may lag behind its tokens, and a character may take several of them.

const REPLACEMENT = "\ufffd"; // stands in a token's text for bytes that are no character by themselves

class Alignment {
  #waiting = []; // tokens whose text has not come yet

  /** Segments `{text, tokens}` for new text and tokens `{text, ...}`; their texts concatenate to `text`. */
  add(text, tokens) {
    this.#waiting.push(...tokens);
    const segments = [];
    while (text) {
      while (this.#waiting[0]?.text === "") this.#waiting.shift();
      const [length, count] = this.#next(text);
      segments.push({text: text.slice(0, length), tokens: this.#waiting.slice(0, count || 1)});
      this.#waiting.splice(0, count);
      text = text.slice(length);
    }
    return segments;
  }

  /** How many characters the next segment has and how many tokens are done with it. */
  #next(text) {
    const [token] = this.#waiting;
    if (!token) return [text.length, 0];
    if (token.text && text.startsWith(token.text)) return [token.text.length, 1];
    if (token.text.startsWith(text)) {
      // A part of the token's text is still held back: it may be the beginning of a stop string.
      this.#waiting[0] = {...token, text: token.text.slice(text.length)};
      return [text.length, 0];
    }
    for (let count = 1; count < this.#waiting.length; count += 1) {
      const following = this.#waiting[count].text;
      const start = following && !following.includes(REPLACEMENT) ? text.indexOf(following) : -1;
      if (start > 0) return [start, count];
    }
    return [text.length, this.#waiting.length];
  }
}
