"""Models in the files of other tools: Hugging Face-style directories with SafeTensors, and GGUF.

Nothing is lost on the way: a model that was exported and is imported again has the same artifact id. The
format is always named, never guessed from what a path looks like.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from artifacts import ModelBundle
from riftco.interchange import gguf, hugging_face
from riftco.interchange.errors import InterchangeError, UnsupportedHuggingFaceModelError
from riftco.interchange.publishing import publish_file

__all__ = [
    "Format",
    "InterchangeError",
    "UnsupportedHuggingFaceModelError",
    "convert_model",
    "export_model",
    "load_model",
]

Format = Literal["rift", "huggingface", "gguf"]

_LOADERS: dict[Format, Callable[[Path], ModelBundle]] = {
    "rift": ModelBundle.load,
    "huggingface": hugging_face.load,
    "gguf": gguf.load,
}


def load_model(source: Path | str, *, format: Format) -> ModelBundle:
    """The model in a file, or in a directory of Hugging Face's.

    Raises InterchangeError or BundleError, both ValueErrors, for what is not such a model, FileNotFoundError
    where nothing is.
    """
    return _LOADERS[_known(format)](Path(source))


def export_model(
    bundle: ModelBundle, destination: Path | str, *, format: Format, gguf_model_name: str = gguf.MODEL_NAME
) -> Path:
    """Write a model under a name that is not taken, in one step; the same model gives the same bytes.

    Raises FileExistsError if the name is taken, OSError if the disk refuses, InterchangeError for a bundle
    that the format cannot hold. `gguf_model_name` is for people and goes into GGUF files alone.
    """
    path = Path(destination)
    if _known(format) != "rift":
        _require_decoder(bundle)
    if format == "huggingface":
        return hugging_face.export(bundle, path)
    return publish_file(path, bundle.chunks() if format == "rift" else gguf.chunks(bundle, gguf_model_name))


def convert_model(
    source: Path | str,
    destination: Path | str,
    *,
    source_format: Format,
    destination_format: Format,
    gguf_model_name: str = gguf.MODEL_NAME,
) -> ModelBundle:
    """Load a model in one format and export it in another; the model. Errors of both."""
    bundle = load_model(source, format=source_format)
    export_model(bundle, destination, format=destination_format, gguf_model_name=gguf_model_name)
    return bundle


def _require_decoder(bundle: ModelBundle) -> None:
    """A bundle may hold any tensors; the formats of others hold those of a decoder."""
    config = bundle.config
    same_count = len(bundle.parameters) == 6 + 16 * config.block_count  # before so many names are made
    if not same_count or bundle.parameters != config.parameter_specs():
        raise InterchangeError("parameters", "the bundle's parameters are not those of its config")


def _known(format: Format) -> Format:
    if format not in get_args(Format):
        raise ValueError(f"format must be one of {', '.join(get_args(Format))}, got {format!r}")
    return format
