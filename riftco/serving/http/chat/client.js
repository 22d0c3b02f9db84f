// The server: health, and a generation as a stream of events. Knows nothing of the page.

const HEALTH_PATIENCE = 8000; // milliseconds

/** What the server refused or could not do; `passing` if the same request may well succeed later. */
class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
    this.passing = status === 0 || status === 408 || status === 429 || status >= 500;
  }
}

async function jsonOf(response) {
  try {
    return await response.json();
  } catch {
    throw new Failure(`the server answered ${response.status} without JSON`, response.status);
  }
}

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const silent = error.name === "TimeoutError";
    throw new Failure(silent ? "the server does not answer" : "the server cannot be reached");
  }
}

/** The health object, also of a server that says (with 503) that it is not well. */
async function readHealth() {
  const response = await reach("/health", {signal: AbortSignal.timeout(HEALTH_PATIENCE)});
  const health = await jsonOf(response);
  if (response.ok || "status" in health) return health;
  throw new Failure(health.detail || response.statusText, response.status);
}

/** The events of one generation, in order; leaving early or aborting `signal` cancels it on the server. */
async function* generate(fields, key, signal) {
  const headers = {"Content-Type": "application/json"};
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await reach("/v1/generate", {
    method: "POST", headers, signal, body: JSON.stringify({...fields, stream: true}),
  });
  if (!response.ok) {
    const {detail, error} = await jsonOf(response);
    throw new Failure(detail || error?.message || response.statusText, response.status);
  }
  for await (const data of sentEvents(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new Failure(event.detail || event.error.message || String(event.error), 500);
    yield event;
  }
  throw new Failure("the connection ended before the answer did");
}

/** The data of each server-sent event of a body, however its bytes are cut into chunks. */
async function* sentEvents(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  try {
    for (;;) {
      const {done, value} = await reader.read();
      if (done) return;
      const parts = (buffer + decoder.decode(value, {stream: true})).split(/\r?\n\r?\n/);
      buffer = parts.pop();
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the connection to the server was lost");
  } finally {
    reader.cancel().catch(() => {});
  }
}
