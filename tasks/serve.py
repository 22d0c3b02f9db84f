"""The proof that a bundle can be served: the real HTTP server, asked through OpenAI's client."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from artifacts import Ref, write_atomic
from riftco.config import ServingConfig
from riftco.errors import InputError
from tasks.call import Results, Work
from tasks.prepare import put_json, read_records
from tasks.step import step

if TYPE_CHECKING:
    import openai

    from riftco.serving import ModelService

PROMPTS_ASKED = 3
NEW_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer and how long its first piece and all of it took."""

    text: str
    first_seconds: float
    seconds: float


@step(version=4)
def check_serving(work: Work, bundle: Ref, test: Ref, config: ServingConfig) -> Results:
    """Answers of the real HTTP server on a free port to prompts of the test split.

    Each prompt is asked alone, once more alone, and with all the others at the same time: RuntimeError names
    one whose answers differ. How long they took is no result, being different every time: it is in the log
    and in `latency.json` of the stage's folder.
    """
    import openai

    from riftco.serving import ModelService, background_server

    prompts = [record["prompt"] for record in read_records(work.store, test)[:PROMPTS_ASKED]]
    with ModelService(work.store.load_bundle(bundle), config) as service, background_server(service) as url:
        asked = [_fitting(service, prompt) for prompt in prompts]
        # loopback never goes by a proxy
        http_client = openai.DefaultHttpxClient(trust_env=False)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http_client) as client:
            alone = [_ask(client, prompt) for prompt in asked]
            again = [_ask(client, prompt) for prompt in asked]
            with ThreadPoolExecutor(len(asked)) as pool:
                together = list(pool.map(lambda prompt: _ask(client, prompt), asked))
        health = service.health()
    for prompt, *answers in zip(asked, alone, again, together, strict=True):
        if health["batch_invariant"] and len({answer.text for answer in answers}) > 1:
            raise RuntimeError(f"the server's answers to {prompt!r} differ: {[a.text for a in answers]}")
    slowest = [1000 * max(answer.first_seconds for answer in answers) for answers in (again, together)]
    work.log.info(
        "serving: %d requests answered alike, first token within %.0f ms alone and %.0f ms together",
        3 * len(prompts),
        *slowest,
    )
    exchanges = [
        {"prompt": prompt, "asked": beginning, "answer": answer.text}
        for prompt, beginning, answer in zip(prompts, asked, alone, strict=True)
    ]
    latency = {
        rounds: [{"first_token_seconds": a.first_seconds, "seconds": a.seconds} for a in answers]
        for rounds, answers in (("alone", alone), ("again", again), ("together", together))
    }
    work.folder.mkdir(parents=True, exist_ok=True)
    write_atomic(work.folder / "latency.json", json.dumps(latency, indent=2).encode())
    return {"exchanges": put_json(work.store, "exchanges", {"health": health, "exchanges": exchanges})}


def _ask(client: "openai.OpenAI", prompt: str) -> Answer:
    begin = perf_counter()
    stream = client.chat.completions.create(
        model="riftco",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=NEW_TOKENS,
        temperature=0,
        stream=True,
    )
    text, first = "", 0.0
    for chunk in stream:
        first = first or perf_counter() - begin
        text += chunk.choices[0].delta.content or ""
    return Answer(text, first, perf_counter() - begin)


def _fitting(service: "ModelService", prompt: str) -> str:
    """The prompt, or the beginning of it that leaves half of the context for the answer."""
    from riftco.chat_template import ChatMessage

    def size(text: str) -> int:
        return len(service.prompt_ids(service.template.render([ChatMessage("user", text)])))

    while 2 * size(prompt) > service.maximum_context and len(prompt) > 1:
        prompt = prompt[: len(prompt) // 2]
    if size(prompt) >= service.maximum_context:
        raise InputError(
            f"a context of {service.maximum_context} tokens has no room for the chat template and an answer; "
            "train with a larger context_size"
        )
    return prompt
