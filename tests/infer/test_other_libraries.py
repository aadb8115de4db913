"""Models of diffusers, and of libraries that load models of transformers themselves, with weights on NVMe: bit-equal to theirs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, PreTrainedModel, pipeline

import swapper
from swapper.integrations.transformers import from_pretrained, streamed

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "red", "old", "fox", "jumps", "over", "dog"]
TEXTS = ["the red fox", "the old dog jumps over the fox"]
BUDGET = "3MiB"


def reads(model: Any, run: Callable[[], Any]) -> bool:
    """Return True if `run` reads weights of a loaded model, whole or by rows: the budget does not hold them."""
    loaded = swapper.loaded(model)
    before = loaded.counters.bytes_read
    run()
    return loaded.counters.bytes_read > before


def aligned(model: Any) -> Any:
    """Return a plain model with weights where torch allocates them: a mapped file's begin anywhere, and kernels round by that."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


# --- diffusers ------------------------------------------------------------------------------------------------------------


def unet() -> tuple[Any, dict[str, torch.Tensor]]:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=16, layers_per_block=1, block_out_channels=(64, 128), norm_num_groups=8, cross_attention_dim=64,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    states = {"encoder_hidden_states": torch.randn(1, 7, 64)}
    return model, {"sample": torch.randn(1, 4, 16, 16), "timestep": torch.tensor([3]), **states}


def transformer() -> tuple[Any, dict[str, torch.Tensor]]:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=32, num_layers=6, sample_size=8, out_channels=4
    )
    inputs = {"timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    return model, {"hidden_states": torch.randn(1, 4, 8, 8), **inputs}


@pytest.mark.parametrize(("make", "budget"), [(unet, "5MiB"), (transformer, "4MiB")])
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16], ids=str)
def test_a_model_of_diffusers_is_that_of_its_from_pretrained(
    tmp_path: Path, make: Any, budget: str, saved: torch.dtype
) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: tools/setup test")
    from swapper.integrations.diffusers import from_pretrained

    model, inputs = make()
    model.to(saved).save_pretrained(tmp_path, max_shard_size="500KB")
    cls = type(model)
    for dtype in (torch.float32, torch.bfloat16):
        plain = aligned(cls.from_pretrained(str(tmp_path), torch_dtype=dtype))
        ours = from_pretrained(cls, str(tmp_path), host_memory=budget if saved == dtype else "12MiB", dtype=dtype)
        given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        with torch.no_grad():
            for _ in range(2):
                assert torch.equal(ours(**given).sample, plain(**given).sample)
            if saved == dtype == torch.float32:
                assert reads(ours, lambda: ours(**given))  # noqa: B023
        assert ours.dtype == plain.dtype == dtype and dict(ours.config) == dict(plain.config)
        swapper.loaded(ours).unload()


def test_a_pipeline_of_diffusers_takes_it(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed: tools/setup test")
    from swapper.integrations.diffusers import from_pretrained

    torch.manual_seed(1)
    blocks = {"down_block_types": ("DownEncoderBlock2D",), "up_block_types": ("UpDecoderBlock2D",)}
    vae = diffusers.AutoencoderKL(block_out_channels=(32,), norm_num_groups=8, sample_size=8, **blocks)
    diffusers.DiTPipeline(transformer()[0], vae, diffusers.DDIMScheduler()).save_pretrained(tmp_path)
    ours = from_pretrained(diffusers.DiTTransformer2DModel, tmp_path / "transformer", host_memory="4MiB")

    def images(**components: Any) -> Any:
        made = diffusers.DiffusionPipeline.from_pretrained(tmp_path, **components)
        aligned(made.vae)
        made.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        return made(class_labels=[1], num_inference_steps=3, generator=generator, output_type="np").images

    plain = aligned(diffusers.DiTTransformer2DModel.from_pretrained(tmp_path / "transformer"))
    assert (images(transformer=ours) == images(transformer=plain)).all()


def test_what_diffusers_would_change_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed: tools/setup test")
    from swapper.integrations.diffusers import from_pretrained

    model, _ = unet()
    model.save_pretrained(tmp_path)
    with pytest.raises(swapper.CheckpointError, match=r"has no config\.json"):
        from_pretrained(type(model), tmp_path.parent)
    keeping = type("Keeping", (type(model),), {"_keep_in_fp32_modules": ["conv_in"]})
    with pytest.raises(swapper.UnsupportedError, match="keeps conv_in in fp32"):
        from_pretrained(keeping, tmp_path, dtype=torch.bfloat16)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    other, _ = transformer()
    other.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "diffusion_pytorch_model.safetensors").rename(tmp_path / "weights.safetensors")
    with pytest.raises(swapper.CheckpointError):  # names of another model
        from_pretrained(type(model), tmp_path)


# --- libraries that call transformers' from_pretrained --------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    path = tmp_path / "bert"
    PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=32, **special).save_pretrained(path)
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4
    )
    BertModel(config).save_pretrained(path)
    return path


def test_sentence_transformers_encode_as_they_do(bert: Path, tmp_path: Path) -> None:
    library = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed: tools/setup test"
    )
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules", exc_type=ImportError)
    path = str(tmp_path / "sentences")
    parts = [modules.Transformer(str(bert)), modules.Pooling(256), modules.Dense(256, 64), modules.Normalize()]
    library.SentenceTransformer(modules=parts, device="cpu").save(path)
    plain = library.SentenceTransformer(path, device="cpu")
    with streamed(host_memory=BUDGET):
        ours = library.SentenceTransformer(path, device="cpu")
    for _ in range(2):
        assert (ours.encode(TEXTS) == plain.encode(TEXTS)).all()
    model = next(module for module in ours.modules() if isinstance(module, BertModel))
    loaded = swapper.loaded(model)
    before, missed = loaded.counters.bytes_read, loaded.counters.pages_missed
    ours.encode(TEXTS)
    assert loaded.counters.pages_missed == missed  # the library calls the model's forward; its parts are read ahead
    assert (
        loaded.read_bytes_a_pass
        == swapper.loaded(from_pretrained(BertModel, bert, host_memory=BUDGET)).read_bytes_a_pass
    )
    assert 0 < loaded.read_bytes_a_pass <= loaded.counters.bytes_read - before  # rows of a table are read too


def test_a_pipeline_of_transformers_by_its_path(bert: Path) -> None:
    usual = PreTrainedModel.__dict__["from_pretrained"]
    plain = pipeline("feature-extraction", model=str(bert), device="cpu")
    with streamed(host_memory=BUDGET):
        ours = pipeline("feature-extraction", model=str(bert), device="cpu")
        with pytest.raises(swapper.ConfigError, match="a second model"):
            BertModel.from_pretrained(bert)
        with pytest.raises(swapper.StateError, match="inside of another"), streamed():
            pass
    assert PreTrainedModel.__dict__["from_pretrained"] is usual
    assert ours(TEXTS) == plain(TEXTS)
    assert reads(ours.model, lambda: ours(TEXTS))
    with swapper.shared_memory("6MiB"), streamed():
        both = [BertModel.from_pretrained(bert) for _ in range(2)]
    tokens = torch.arange(4)[None]
    with torch.no_grad():
        assert torch.equal(*(model(tokens).last_hidden_state for model in both))
