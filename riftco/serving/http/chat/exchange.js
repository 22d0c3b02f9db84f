// One request from its first event to its end, and what is to be said about it afterwards.

const ENDINGS = {timeout: "timed out", error: "failed", cancelled: "stopped"};

const duration = (milliseconds) =>
  milliseconds < 1000 ? `${Math.round(milliseconds)} ms` : `${(milliseconds / 1000).toFixed(1)} s`;

class Exchange {
  failure = null; // what ended it before its time, unless it was stopped
  usage = null; // the server's count of tokens, with the last event
  #abort = new AbortController();
  #started = performance.now();
  #heard = performance.now();
  #count = 0;
  #reason = "";

  /** Hand each event to `take` until the end, which failures are, too. */
  async run(fields, key, take) {
    try {
      for await (const event of generate(fields, key, this.#abort.signal)) {
        this.#heard = performance.now();
        this.#count += event.token_ids?.length ?? 0;
        this.#reason = event.finish_reason ?? "";
        this.usage = event.usage ?? null;
        take(event);
      }
    } catch (error) {
      if (!this.stopped) this.failure = error;
    }
  }

  stop() {
    this.#abort.abort();
  }

  get stopped() {
    return this.#abort.signal.aborted;
  }

  /** Milliseconds since the server said something. */
  get silence() {
    return performance.now() - this.#heard;
  }

  /** Remarks to stand under the answer of a model with this many tokens of context. */
  remarks(context) {
    if (this.failure && !this.#count) return [];
    const {prompt_tokens: prompt, cached_tokens: cached, generated_tokens: count = this.#count} =
      this.usage ?? {};
    return [
      `${count} ${count === 1 ? "token" : "tokens"} in ${duration(performance.now() - this.#started)}`,
      this.stopped ? "stopped" : this.failure ? "incomplete" : ENDINGS[this.#reason],
      cached && `${cached} of ${prompt} prompt tokens from the cache`,
      prompt > context && `only the latest ${context} of ${prompt} prompt tokens count`,
    ].filter(Boolean);
  }
}
