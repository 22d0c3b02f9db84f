// The page: connection, settings, and one answer at a time.

const ALTERNATIVES = 5;
const SILENCE = 4000; // milliseconds without an event after which the server's health is looked at
const STATES = {
  connecting: "connecting",
  online: "online",
  stalled: "stalled: the engine has stopped",
};

const at = (id) => document.getElementById(id);
const announce = (text) => at("announcer").replaceChildren(text);
const message = at("message");
const log = new MessageLog({log: at("log"), main: at("main"), end: at("end")});
const inspector = new Inspector(at("card"), at("log"), announce);
const conversation = new Conversation();
let context = 0; // tokens; 0 until the server said so
let online = false;
let running = null; // the Exchange in progress
let unsent = 0; // earlier turns that did not fit the latest prompt

/** What `action` gives with the browser's storage, null where that is forbidden. */
function stored(action) {
  try {
    return action();
  } catch {
    return null;
  }
}

// ---- the state of the page

function refresh() {
  if (!running && document.activeElement === at("stop")) message.focus();
  at("send").hidden = running !== null;
  at("send").disabled = !online;
  at("stop").hidden = running === null;
  at("clear").disabled = running !== null;
  at("log").setAttribute("aria-busy", String(running !== null));
  describe();
}

/** Say what the settings are and what will be sent. */
function describe() {
  const tokens = at("tokens").value;
  const temperature = Number(at("temperature").value).toFixed(1);
  const together = at("turns").checked;
  at("tokens-value").value = tokens;
  at("temperature-value").value = temperature;
  const seed = Number(temperature) ? `seed ${at("seed").value}` : "";
  const chosen = [`${tokens} new tokens`, `temperature ${temperature}`, seed, together ? "multi-turn" : ""];
  at("chosen").textContent = chosen.filter(Boolean).join(", ");
  const sent = together ? turnsNotice() : aloneNotice();
  at("notice").textContent = `Enter sends, Shift+Enter starts a new line. ${sent}`;
}

const aloneNotice = () =>
  "Each message is answered on its own: earlier ones are not sent. " +
  `Only the latest ${context || "few"} tokens count.`;

function turnsNotice() {
  const rule = `Earlier turns are sent too, the newest that fit into ${context || "a few"} tokens.`;
  if (!unsent) return rule;
  return `${rule} ${unsent === 1 ? "The oldest turn no longer fits" : `The oldest ${unsent} no longer fit`}.`;
}

// ---- the connection

function setConnection(state, text = STATES[state]) {
  const shown = at("connection");
  online = state === "online";
  shown.dataset.state = state;
  if (shown.textContent !== text) shown.textContent = text;
  at("retry").hidden = state === "online" || state === "connecting";
  refresh();
}

/** Take the server's health as it is. */
async function look() {
  try {
    const health = await readHealth();
    showHealth(health);
    setConnection(health.status === "ok" ? "online" : "stalled");
  } catch (error) {
    setConnection("offline", `offline: ${error.message}`);
  }
}

async function retry() {
  setConnection("connecting");
  await look();
  (online ? message : at("retry")).focus();
}

function showHealth(health) {
  at("key-field").hidden = health.keys !== true;
  if (!health.artifact_id) return; // no model is loaded before the first question
  const facts = {
    stage: health.artifact_stage.replaceAll("_", "-"),
    backend: [health.backend, health.weights, health.mode].filter(Boolean).join(", "),
    cache: `${health.kv_cache}, ${health.kv_cache_block_size} per page`,
    context: health.maximum_context,
    vocabulary: health.vocabulary_size,
    artifact: health.artifact_id.slice(0, 10),
  };
  for (const [id, fact] of Object.entries(facts)) at(id).textContent = fact;
  at("artifact").title = health.artifact_id;
  at("details").hidden = false;
  at("tokens").max = health.maximum_new_tokens; // the browser lowers the value
  context = health.maximum_context;
}

// ---- one answer

/** Answer a question; `node` is its message in the log. */
async function answer(question, node) {
  const prompt = promptFor(question, node);
  const reply = new Answer(log, inspector);
  running = new Exchange();
  refresh();
  const watch = setInterval(() => running.silence > SILENCE && look(), SILENCE / 2);
  await running.run({prompt, ...choices()}, at("key").value.trim(), (event) => {
    if (!online) setConnection("online");
    reply.add(event);
  });
  clearInterval(watch);
  const {failure, stopped, usage} = running;
  reply.finish(running.remarks(context));
  running = null;
  if (usage) conversation.measure(prompt, usage.prompt_tokens);
  if (failure) {
    fail(failure, question, node);
  } else {
    if (reply.text) conversation.turns.push({question, answer: reply.text, node});
    announce(`Model: ${reply.text || NOTHING}${stopped ? " (stopped)" : ""}`);
  }
  if (!context) look();
  refresh();
}

function promptFor(question, node) {
  const alone = {prompt: asked(question), kept: [], dropped: 0};
  const plan = at("turns").checked ? conversation.plan(question, context - at("tokens").value) : alone;
  unsent = plan.dropped;
  log.horizon(unsent ? (plan.kept[0]?.node ?? node) : null);
  return plan.prompt;
}

const choices = () => ({
  max_new_tokens: Number(at("tokens").value),
  temperature: Number(at("temperature").value),
  seed: Number(at("seed").value),
  logprobs: ALTERNATIVES,
  stop: STOP,
});

function fail(failure, question, node) {
  log.failure(failure.message, failure.passing && ((shown) => {
    if (running || !online) return;
    shown.remove();
    message.focus();
    answer(question, node);
  }));
  if (failure.status === 0) look();
  if (failure.status !== 401 || at("key-field").hidden) return;
  at("settings").open = true;
  at("key").focus();
}

// ---- what the user does

function submit(event) {
  event.preventDefault();
  const question = message.value.trim();
  if (!question || !online || running) return;
  message.value = "";
  grow();
  message.focus();
  answer(question, log.user(question));
}

function pressed(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  if (online && !running) at("composer").requestSubmit();
}

function grow() {
  message.style.height = "auto";
  message.style.height = `${message.scrollHeight}px`;
}

function clear() {
  conversation.turns = [];
  unsent = 0;
  inspector.hide();
  log.greet();
  describe();
  message.focus();
}

function escaped(event) {
  if (event.key !== "Escape" || event.isComposing) return;
  if (inspector.open) inspector.hide();
  else running?.stop();
}

const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function isDark() {
  const {theme} = document.documentElement.dataset;
  return theme ? theme === "dark" : darkSystem.matches;
}

function setTheme(theme) {
  if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
  at("theme").setAttribute("aria-pressed", String(isDark()));
}

at("composer").addEventListener("submit", submit);
at("composer").addEventListener("input", describe);
message.addEventListener("keydown", pressed);
message.addEventListener("input", grow);
at("stop").addEventListener("click", () => running?.stop());
at("clear").addEventListener("click", clear);
at("retry").addEventListener("click", retry);
at("seed").addEventListener("invalid", () => (at("settings").open = true));
at("key").addEventListener("input", () => {
  stored(() => sessionStorage.setItem("riftco-key", at("key").value));
});
at("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  setTheme(theme);
  stored(() => localStorage.setItem("riftco-theme", theme));
});
darkSystem.addEventListener("change", () => setTheme());
addEventListener("keydown", escaped);
addEventListener("online", look);

setTheme(stored(() => localStorage.getItem("riftco-theme")));
at("key").value = stored(() => sessionStorage.getItem("riftco-key")) ?? "";
at("settings").open = matchMedia("(min-width: 48rem) and (min-height: 44rem)").matches;
log.greet();
refresh();
look();
