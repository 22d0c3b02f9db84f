"""The commands that run a model: streamed text, keys, and a real server process of two models."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from typer.testing import CliRunner

from artifacts import ModelBundle
from riftco.chat_template import PLAIN, ChatMessage
from riftco.cli import app
from riftco.serving import ModelService
from riftco.serving.http.access import Access
from tests.riftco.serving.http.support import any_text_bundle
from tests.support import FIXTURES

BYTE, BPE = FIXTURES / "byte.rift", FIXTURES / "bpe.rift"


def riftco(*words: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, result.output


def test_chat_gives_the_answer_alone_and_ends_it_before_the_next_turn(tmp_path: Path) -> None:
    bundle = any_text_bundle()
    path = bundle.save(tmp_path / "any.rift")
    prompt = PLAIN.render([ChatMessage("user", "hi")])
    with ModelService(bundle) as service:
        whole = service.generate(prompt, max_new_tokens=8).raw_bytes[len(prompt.encode()) :]
    text = whole.decode(errors="replace")
    assert riftco("generate", path, "hi", "--chat", "--max-new-tokens", 8) == (0, f"{text}\n")
    cut = text[3:5]
    expected = f"{text[: text.index(cut)]}\n"
    assert riftco("generate", path, "hi", "--chat", "--max-new-tokens", 8, "--stop", cut) == (0, expected)


def test_generate_reads_a_pipe_and_can_print_the_new_text_alone() -> None:
    code, whole = riftco("generate", BYTE, "the ", "--max-new-tokens", 5)
    for words in ((), ("-",)):
        command = ["generate", str(BYTE), *words, "--max-new-tokens", "5"]
        result = CliRunner().invoke(app, command, input="the ")
        assert (code, result.exit_code, result.output) == (0, 0, whole)
    assert riftco("generate", BYTE, "the ", "--max-new-tokens", 5, "--no-echo") == (0, whole[4:])
    lines = CliRunner().invoke(app, ["generate", str(BYTE), "--max-new-tokens", "1"], input="a\r\nb")
    assert lines.output.startswith("a\nb")
    broken = CliRunner().invoke(app, ["generate", str(BYTE)], input=b"ab\xff")
    assert (broken.exit_code, "standard input:1: not UTF-8" in broken.output) == (2, True)


def test_a_setting_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    code, output = riftco("generate", BYTE, "the ", "--temperature", 1, "--top-k", 30)
    assert (code, output) == (2, "riftco: top_k must not exceed the vocabulary of 29\n")
    assert riftco("generate", BYTE, "the ", "--temperature", 1, "--top-p", 0)[0] == 2
    for ignored in (("--top-k", 5), ("--top-p", 0.5)):
        code, output = riftco("generate", BYTE, "the ", *ignored)
        assert (code, "need a --temperature" in output) == (2, True)
    for memory in ("nan", "inf", "0"):
        assert riftco("serve", BYTE, "--memory", memory)[0] == 2


def test_a_prompt_longer_than_the_context_is_said_to_be_cut() -> None:
    result = CliRunner().invoke(app, ["generate", str(BYTE), "the " * 50, "--max-new-tokens", "1"])
    context = ModelBundle.load(BYTE).config.maximum_context
    assert (result.exit_code, result.stdout[:200]) == (0, "the " * 50)
    assert (
        result.stderr == f"riftco: the prompt has 200 tokens; the model's context holds the last {context}\n"
    )


def test_a_model_tuned_with_a_template_of_somebodys_own_still_continues_text(tmp_path: Path) -> None:
    known = ModelBundle.load(BYTE)
    parts = (known.config, known.tokenizer, known.parameters, known.weights)
    foreign = ModelBundle(*parts, stage="post-training", metadata={"formatter": "MyFormatter"})
    path = foreign.save(tmp_path / "foreign.rift")
    assert riftco("generate", path, "the ", "--max-new-tokens", 2)[0] == 0
    code, output = riftco("generate", path, "the ", "--chat")
    assert (code, "MyFormatter" in output) == (2, True)


def test_a_key_is_shown_once_and_stored_as_a_hash(tmp_path: Path) -> None:
    file = tmp_path / "keys.txt"
    code, secret = riftco("key", "alice", "--file", file, "--per-minute", 60)
    assert code == 0
    assert riftco("key", "bob", "--file", file)[0] == 0
    assert secret.strip() not in file.read_text()
    assert [(k.name, k.per_minute) for k in Access.from_file(file).keys] == [("alice", 60), ("bob", None)]
    code, output = riftco("key", "alice", "--file", file)
    assert (code, "alice has a key already" in output) == (2, True)
    assert riftco("key", "no spaces", "--file", file)[0] == 2
    file.write_text(file.read_text().rstrip("\n"))
    assert riftco("key", "carol", "--file", file)[0] == 0
    assert [k.name for k in Access.from_file(file).keys] == ["alice", "bob", "carol"]


def test_a_server_of_two_models_answers_for_a_key_and_ends_in_peace(tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    secret = riftco("key", "alice", "--file", keys)[1].strip()
    command = [
        sys.executable,
        "-c",
        "from flows.cli import main; main()",
        "serve",
        f"team/one={BYTE}",
        BPE,
        "--port",
        "0",
    ]
    command += ["--keys", keys, "--weights", "nf4", "-s", "maximum_running=4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            announced = server.stdout.readline()
            assert announced.startswith(
                "Serving team/one (0f0c01e384), bpe (9de888b38e) at http://127.0.0.1:"
            )
            url = announced.split(" at ")[1].split()[0]
            assert _get(f"{url}/health")["weights"] == "nf4"
            models = _get(f"{url}/v1/models", secret)["data"]
            assert [model["id"] for model in models] == ["team/one", "bpe"]
            assert _get(f"{url}/v1/models/team/one", secret)["id"] == "team/one"
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def _get(url: str, secret: str = "") -> dict:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {secret}"})
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as response:
        return json.load(response)
