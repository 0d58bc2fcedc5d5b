"""The built-in model's corpus: one function of Python's standard library per document.

Every function and method is printed back from its syntax tree (`ast.unparse`), without its decorators, docstring
and comments: one statement per line, uniform quotes and indentation. A small model then spends its few parameters on
code rather than on layout, and the first line of a document is always the whole signature.

The split is by module: about one module in sixteen is held out, and a held-out function whose body also occurs in
the training part (copies, trivial accessors) is dropped, so that no body leaks.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import platform
import random
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

BEGIN, END = "<|begin|>", "<|end|>"
VOCABULARY = 4096
MAX_CHARACTERS, MAX_LINE = 1400, 120
HELD_OUT_ONE_IN = 16
REPEATED_LINES, REPEATED_START = 3, 10  # lines, characters
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})

# A newline with the indentation after it is one piece, so a signature always ends at a token boundary.
PIECES = r"\n *|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s"


@dataclass(frozen=True)
class Document:
    """One function: `text` is its whole source, `module` the file it is from, relative to the standard library."""

    module: str
    text: str

    @property
    def signature(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def body(self) -> str:
        return self.text.partition("\n")[2]

    @property
    def is_test(self) -> bool:
        return not TEST_FOLDERS.isdisjoint(Path(self.module).parts)

    @property
    def is_repetitive(self) -> bool:
        """Whether REPEATED_LINES lines in a row begin alike: long lists of assertions, tables of assignments."""
        starts = [line.strip()[:REPEATED_START] for line in self.body.split("\n")]
        runs = (len(list(group)) for _, group in itertools.groupby(starts))
        return max(runs) >= REPEATED_LINES

    @property
    def in_held_out_module(self) -> bool:
        return _hash(self.module) % HELD_OUT_ONE_IN == 0


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _functions(source: str) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the test-suite holds invalid escapes on purpose
        tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
            if node.body:
                yield ast.unparse(node)


def _fits(text: str) -> bool:
    lines = text.split("\n")
    return len(lines) > 1 and len(text) <= MAX_CHARACTERS and max(map(len, lines)) <= MAX_LINE


def read_documents(folder: Path) -> list[Document]:
    """Every distinct function under `folder` that fits, in the order of the files' names."""
    documents: dict[str, Document] = {}
    paths = [path for path in sorted(folder.rglob("*.py")) if "site-packages" not in path.parts]
    for path in tqdm(paths, desc="reading the library", unit="file", mininterval=1):
        module = path.relative_to(folder).as_posix()
        try:
            texts = list(_functions(path.read_text("utf-8")))
        except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
            continue  # files the test-suite breaks on purpose, and lib2to3's Python 2
        for text in filter(_fits, texts):
            documents.setdefault(text, Document(module, text))
    return list(documents.values())


def split(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents: by module, and no held-out body occurs twice or in training."""
    training = [document for document in documents if not document.in_held_out_module]
    seen = {document.body for document in training}
    held_out = []
    for document in documents:
        if document.in_held_out_module and document.body not in seen:
            seen.add(document.body)
            held_out.append(document)
    return training, held_out


def library_sample(held_out: list[Document], count: int, seed: int) -> list[Document]:
    """`count` held-out functions of the library proper (not of its tests), no two with the same signature."""
    library = {document.signature: document for document in held_out if not document.is_test}
    return random.Random(seed).sample(list(library.values()), count)


def train_tokenizer(documents: list[Document]) -> Tokenizer:
    """Byte-level BPE: any text survives encode and decode; encoding adds the begin token in front."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, tokenizer.token_to_id(BEGIN))]
    )
    return tokenizer


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def write_signatures(path: Path, sample: list[Document], seed: int) -> None:
    """The signatures to evaluate on, with where they are from; the bodies stay out."""
    record = {
        "python": platform.python_version(),
        "split": f"held out: modules whose sha256 (first 8 bytes, big-endian) is 0 modulo {HELD_OUT_ONE_IN}",
        "sample_seed": seed,
        "signatures": [{"module": document.module, "signature": document.signature} for document in sample],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the size of the corpus; write the signatures to evaluate on.")
    parser.add_argument("--stdlib", type=Path, default=standard_library(), help="folder of the standard library")
    parser.add_argument("--signatures", type=Path, help="write a sample of held-out signatures to this file")
    parser.add_argument("--count", type=int, default=200, help="how many signatures")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    arguments = parser.parse_args()
    training, held_out = split(read_documents(arguments.stdlib))
    for name, documents in (("training", training), ("held out", held_out)):
        for kind, is_test in (("library", False), ("its tests", True)):
            chosen = [document for document in documents if document.is_test is is_test]
            print(f"{name:9} {kind:10} {len(chosen):7,} functions {sum(len(d.text) for d in chosen):11,} characters")
    if arguments.signatures:
        sample = library_sample(held_out, arguments.count, arguments.seed)
        write_signatures(arguments.signatures, sample, arguments.seed)


if __name__ == "__main__":
    main()
