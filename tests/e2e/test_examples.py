"""The scripts in examples/ run as they are printed, on a model that is small."""

from __future__ import annotations

import http.client
import re
import signal
import threading
from pathlib import Path

import pytest
import torch

from e2e.processes import killed_at_step, run_python, started_python

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WORDS = ["the", "quick", "brown", "fox"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a small causal language model and its tokenizer, as save_pretrained leaves it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="</s>")
    wrapped.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


IN_FOLDER = """
import os, runpy, sys
folder, examples, name = sys.argv[1:4]
os.chdir(folder)
sys.path.insert(0, examples)
sys.argv = sys.argv[3:]
runpy.run_path(examples + "/" + name, run_name="__main__")
"""
"""Runs an example in a folder of its own."""


def run(name: str, *arguments: object) -> str:
    done = run_python(EXAMPLES / name, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_a_state_is_saved_loaded_and_exported(tmp_path: Path) -> None:
    assert "the model alone, as safetensors" in run("save_load.py", "--directory", tmp_path, "--width", 64)
    assert list(tmp_path.iterdir()) == []


def test_text_is_generated(model: Path) -> None:
    assert " 3 tokens in " in run("generate.py", model, "the quick", "--host-memory", "64MiB", "--tokens", 3)


def test_a_generation_that_is_interrupted_leaves_no_file(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with started_python("-c", IN_FOLDER, tmp_path, EXAMPLES, "generate.py", "--tokens", 1900) as example:
        assert example.stdout.read(1) == "1"  # the prompt: it generates
        example.send_signal(signal.SIGINT)
        said = example.stderr.read()
    assert "Interrupted. Nothing is left behind." in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_training_that_is_interrupted_continues(tmp_path: Path) -> None:
    size = ("--parameters", 1_000_000, "--context", 32, "--batch", 1, "--budget", "32MiB", "--directory")
    with started_python(EXAMPLES / "train.py", *size, tmp_path / "run", "--steps", 100_000) as training:
        next(line for line in iter(training.stdout.readline, "") if line.startswith("step   2"))
        training.send_signal(signal.SIGINT)
        said = training.stderr.read()
    assert "Interrupted: the same command continues" in said and "Traceback" not in said
    resumed = run("train.py", *size, tmp_path / "run", "--steps", 1)
    step = int(re.findall(r"continues after step (\d+)", resumed)[0])
    assert step >= 2
    again = run("train.py", *size, tmp_path / "run", "--steps", step + 2)
    straight = run("train.py", *size, tmp_path / "whole", "--steps", step + 2)
    held_out = [re.findall(r"held out  loss ([\d.]+)", printed) for printed in (again, straight)]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 2 and len(set(held_out[0])) == 1


def ask(port: int, prompt: str, tokens: int, leaves: bool = False) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", f"/generate?prompt={prompt}&tokens={tokens}")
    response, text = connection.getresponse(), b""
    while (more := response.read1(64)) and not (leaves and text):
        text += more
    connection.close()
    return text.decode()


def test_clients_of_a_server_get_what_they_get_alone_and_one_may_leave(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with started_python("-c", IN_FOLDER, tmp_path, EXAMPLES, "serve.py", "--port", 0) as server:
        lines = iter(server.stderr.readline, "")
        port = int(next(found[1] for line in lines if (found := re.search(r"running on http://127.0.0.1:(\d+)", line))))
        answers: dict[int, str] = {}

        def client(number: int, tokens: int) -> None:
            answers[number] = ask(port, f"{number}+2+3", tokens, leaves=number == 2)

        threads = [threading.Thread(target=client, args=pair) for pair in ((0, 12), (1, 12), (2, 1000))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(ask(port, f"{number}+2+3", 12) == answers[number] for number in (0, 1))
        assert len(answers[0].split()) == 12 and answers[0] != answers[1]
        server.send_signal(signal.SIGINT)
        printed = server.stdout.read()
    assert printed.count("12 of 12 tokens") == 4 and int(re.findall(r"(\d+) of 1000 tokens", printed)[0]) < 100
    assert "MB a pass" in printed


def test_the_server_says_what_it_needs(tmp_path: Path) -> None:
    done = run_python("-c", "import sys; sys.modules['fastapi'] = None" + IN_FOLDER, tmp_path, EXAMPLES, "serve.py")
    assert done.returncode == 1 and "pip install fastapi uvicorn" in done.stderr


@pytest.mark.parametrize("adapters", [(), ("--lora", 2)], ids=["all parameters", "adapters"])
def test_a_model_is_fine_tuned_and_resumed(model: Path, tmp_path: Path, adapters: tuple[object, ...]) -> None:
    pytest.importorskip("accelerate")
    if adapters:
        pytest.importorskip("peft")
    text = tmp_path / "lines.txt"
    text.write_text("the quick brown fox\nthe fox\n" * 4)
    command = ("--model", model, "--text", text, "--directory", tmp_path / "run", "--budget", "64MiB", *adapters)
    assert "step   2 " in run("finetune.py", *command, "--steps", 2)
    resumed = run("finetune.py", *command, "--steps", 3)
    assert "step   3 " in resumed and "step   2 " not in resumed
    assert list((tmp_path / "run" / "result").glob("*.safetensors"))


KILLED = killed_at_step(3, "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')")


def test_a_killed_fine_tuning_gives_the_result_of_one_that_was_not(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "lines.txt").write_text("".join(f"{first} {second} fox\n" for first in WORDS for second in WORDS))
    (tmp_path / "killed.py").write_text(KILLED)
    common = ("--model", model, "--text", tmp_path / "lines.txt", "--budget", "64MiB", "--steps", 6, "--directory")
    run("finetune.py", *common, tmp_path / "whole")
    killed = run_python(tmp_path / "killed.py", EXAMPLES / "finetune.py", *common, tmp_path / "run")
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    resumed = run("finetune.py", *common, tmp_path / "run")
    steps = re.findall(r"^step +(\d+) ", resumed, re.MULTILINE)
    assert steps in (["4", "5", "6"], ["3", "4", "5", "6"])  # the third step was over, and maybe not yet on the drive
    results = [(tmp_path / name / "result" / "model.safetensors").read_bytes() for name in ("run", "whole")]
    assert results[0] == results[1] != (model / "model.safetensors").read_bytes()


def test_two_processes_fine_tune_one_model(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    text = tmp_path / "lines.txt"
    text.write_text("the quick brown fox\nthe fox\n" * 4)
    command = (
        EXAMPLES / "finetune.py",
        "--model",
        model,
        "--text",
        text,
        "--directory",
        tmp_path / "run",
        "--budget",
        "64MiB",
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    # without --cpu, with which accelerate starts one process
    accelerate = (
        *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
        *("--mixed_precision=no", "--dynamo_backend=no", "--rdzv_backend=c10d", "--main_process_port=0"),
    )
    for launcher, steps in ((torchrun, 2), (accelerate, 3)):
        done = run_python(*launcher, *command, "--steps", steps, ACCELERATE_USE_CPU="true")
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.findall(r"^step +(\d+) ", done.stdout, re.MULTILINE) == (["1", "2"] if steps == 2 else ["3"])
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"rank-0-of-2", "rank-1-of-2", "result"}


def test_a_sharded_model_is_trained_by_several_processes_and_resumed(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", EXAMPLES / "fsdp.py")
    size = ("--directory", tmp_path, "--parameters", 2_000_000, "--context", 32, "--batch", 1)
    for more in (("--steps", 2), ("--steps", 3, "--resume")):
        done = run_python(*torchrun, *size, *more)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"step {more[1]:3}" in done.stdout
