"""The command that takes models to other tools and back."""

from pathlib import Path
from typing import Annotated

import typer

from riftco.commands import open_bundle, user_errors
from riftco.interchange import Format, export_model, load_model
from riftco.interchange.gguf import MODEL_NAME


def convert(
    source: Annotated[
        str,
        typer.Argument(help="The model; a bundle may be a name in the store.", metavar="SOURCE"),
    ],
    destination: Annotated[Path, typer.Argument(help="A name that is not taken.", metavar="DESTINATION")],
    source_format: Annotated[Format, typer.Option("--from", help="What SOURCE is.")],
    destination_format: Annotated[Format, typer.Option("--to", help="What to write.")],
    gguf_model_name: Annotated[
        str, typer.Option(help="What a GGUF file calls the model, for people.", metavar="NAME")
    ] = MODEL_NAME,
) -> None:
    """Write a model in the format of another tool, or take one back, which has the same artifact id then.

    **huggingface** is a directory: config.json, model.safetensors and the tokenizer. **gguf** is one file.
    Formats are never guessed from names. Other tools read the files, tensors and all; to compute with them
    they would have to know this architecture.

    Examples: `riftco convert demo/pretrain exported --from rift --to huggingface`,
    `riftco convert exported again.rift --from huggingface --to rift`
    """
    with user_errors(resumes=False):
        rift = source_format == "rift"
        bundle = open_bundle(source) if rift else load_model(source, format=source_format)
        export_model(bundle, destination, format=destination_format, gguf_model_name=gguf_model_name)
        typer.echo(f"{destination}: {destination_format}, {bundle.stage}, artifact {bundle.artifact_id}")
