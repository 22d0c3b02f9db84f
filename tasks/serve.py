"""The proof that a bundle can be served: the real HTTP server, asked as a client would ask it."""

import json
import urllib.request
from typing import Any

from artifacts import Ref
from riftco.config import ServingConfig
from tasks.call import Results, Work
from tasks.prepare import put_json, read_records
from tasks.step import step

PROMPTS_ASKED = 3
NEW_TOKENS = 16


@step(version=1)
def check_serving(work: Work, bundle: Ref, test: Ref, config: ServingConfig) -> Results:
    """Answers of the real HTTP server on a free port, which must be the model's own, twice the same.

    RuntimeError names the request whose answer differs.
    """
    from riftco.data import PlainChatFormatter
    from riftco.serving import ModelService
    from riftco.serving.server import background_server

    records = read_records(work.store, test)[:PROMPTS_ASKED]
    prompts = [PlainChatFormatter().format_prompt(record["prompt"]) for record in records]
    exchanges = []
    count = min(NEW_TOKENS, config.maximum_new_tokens)
    with ModelService(work.store.load_bundle(bundle), config) as service, background_server(service) as url:
        health = _request(f"{url}/health")
        for prompt in prompts:
            body = {"prompt": prompt, "max_new_tokens": count}
            answers = [_request(f"{url}/v1/generate", body) for _ in range(2)]
            expected = list(service.generate(prompt, max_new_tokens=count).generated_token_ids)
            for answer in answers:
                if answer["generated_token_ids"] != expected:
                    raise RuntimeError(f"the server's answer to {prompt!r} is not the model's own")
            exchanges.append({"prompt": prompt, "answer": answers[0]["generated_text"]})
            work.progress(len(exchanges), len(prompts))
    work.log.info("serving: %d requests answered as the model itself answers", 2 * len(exchanges) + 1)
    return {"exchanges": put_json(work.store, "exchanges", {"health": health, "exchanges": exchanges})}


def _request(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes by a proxy
    with opener.open(request, timeout=60) as response:
        return json.load(response)
