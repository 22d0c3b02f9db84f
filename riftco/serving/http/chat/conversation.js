// What is sent: the text of the "plain" chat template, and as many earlier turns as fit the context.

const STOP = ["\n### User:"]; // here the model would start to write the next question itself

const asked = (question) => `### User:\n${question}\n### Assistant:\n`;
const answered = (turn) => `${asked(turn.question)}${turn.answer}\n`;
const bytes = (text) => new TextEncoder().encode(text).length;

class Conversation {
  turns = []; // {question, answer, node}, oldest first
  #density = 1; // tokens per byte; never more than one, and measured by each answer

  /** The prompt for a question after the newest turns that fit `room` tokens; how many were `dropped`. */
  plan(question, room) {
    const cost = (text) => Math.ceil(bytes(text) * this.#density);
    let left = room - cost(asked(question));
    let first = this.turns.length;
    while (first > 0 && (left -= cost(answered(this.turns[first - 1]))) >= 0) first -= 1;
    const kept = this.turns.slice(first);
    return {prompt: kept.map(answered).join("") + asked(question), kept, dropped: first};
  }

  /** A prompt of this text turned out to have that many tokens. */
  measure(prompt, tokens) {
    this.#density = Math.min(1, tokens / bytes(prompt));
  }
}
