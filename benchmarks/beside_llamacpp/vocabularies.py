"""Token ids of the vocabularies in llama.cpp's source package, beside those that it records for its own test texts.

    pip download --no-deps --no-binary :all: llama-cpp-python
    tar xzf llama_cpp_python-*.tar.gz
    python -m benchmarks.beside_llamacpp vocabularies llama_cpp_python-*/vendor/llama.cpp/models --output FILE.md
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.commands import parser_of

from slotwise.platform.gguf_file import open_model
from slotwise.text.gguf_tokenizer import MODEL, PRE
from slotwise.text.tokenizer import Tokenizer, TokenizerError

SEPARATOR = "\n__ggml_vocab_test__\n"  # between the texts of a file


class Result(NamedTuple):
    name: str
    kind: str
    tokens: int
    same: int
    texts: int
    note: str = ""


def compared(path: Path) -> Result:
    metadata = open_model(path).metadata
    kind = f"{metadata.text(MODEL)}, {metadata.text(PRE, '–')}"
    texts, expected = Path(f"{path}.inp"), Path(f"{path}.out")
    try:
        tokenizer = Tokenizer.load(path)
    except TokenizerError as error:
        return Result(path.name, kind, 0, 0, 0, str(error).removeprefix(f"{path}: ").partition(";")[0])
    if not texts.is_file():
        return Result(path.name, kind, tokenizer.vocab_size, 0, 0, "no test texts")
    asked = texts.read_text(encoding="utf-8").split(SEPARATOR)
    lines = expected.read_text().split("\n")[: len(asked)]  # of an empty text the line is empty
    same = sum(tokenizer.encode(text, add_special_tokens=False) == [*map(int, line.split())]
               for text, line in zip(asked, lines, strict=True))
    return Result(path.name, kind, tokenizer.vocab_size, same, len(asked))


def table(results: list[Result]) -> str:
    rows = [f"| `{one.name}` | {one.kind} | {one.tokens or '–'} | "
            f"{f'{one.same} of {one.texts}' if one.texts else one.note} |" for one in results]
    return "\n".join(["| file | `tokenizer.ggml.model`, `pre` | tokens | texts with llama.cpp's ids |",
                      "| --- | --- | --: | --- |", *rows]) + "\n"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="models/ in llama.cpp's source")
    parser.add_argument("--package", default="", help="its name and version, for the result")
    parser.add_argument("--output", type=Path, help="a page to write")
    asked = parser.parse_args()
    results = [compared(path) for path in sorted(asked.folder.glob("ggml-vocab-*.gguf"))]
    text = table(results)
    print(text)
    if asked.output:
        title = "# Vocabularies of llama.cpp's source package\n\n"
        by = f"Written by `python -m benchmarks.beside_llamacpp vocabularies`, with {asked.package}.\n\n"
        asked.output.write_text(title + by + text)
