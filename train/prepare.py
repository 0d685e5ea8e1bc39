"""Text as tokens on disk: the verb `prepare`."""

import concurrent.futures
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import datasets
import pyarrow
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from laplacian_heads import recipes, sources
from laplacian_heads.files import make_folder, write
from laplacian_heads.shards import Part
from laplacian_heads.train.recipe import check_on_bad_data
from laplacian_heads.train.stage import load_tokenizer
from laplacian_heads.train.streams import DocumentStream, Stream, text_or_tokens

ROWS = 50_000  # of a shard that become a file of their own at most: what a killed run does again


@dataclasses.dataclass(kw_only=True)
class PrepareRecipe:
    """Keys of the recipes for tokenised corpora."""

    data: str | list
    output: str
    tokenizer: str
    processes: int
    on_bad_data: str

    def __post_init__(self):
        check_on_bad_data(self.on_bad_data)
        if self.processes < 1:
            raise ValueError(f"processes is {self.processes}, allowed is at least 1.")
        for name in ("data", "output", "tokenizer"):
            if not getattr(self, name):
                raise ValueError(f"{name} is {getattr(self, name)!r}, allowed is the name of one.")


def prepare(recipe: PrepareRecipe, dry_run: bool = False) -> None:
    """Encode a corpus once, in parallel, as a folder that `datasets.load_from_disk` and the recipes' `data` read.

    Its column input_ids has the tokens of each document, BOS first. The tokenizer lies beside it. An interrupted run
    goes on with the files that are missing.

    Raises:
        ValueError: a value of the recipe or its data is not allowed, or the folder holds something else.
    """
    output = Path(recipe.output).expanduser()
    print(f"the tokens of {recipe.data} by {recipe.tokenizer}, with {recipe.processes} processes, into {output}")
    if dry_run:
        return
    tokenizer = load_tokenizer(recipe.tokenizer, vocab_size=2**31)
    recipes.check_output(output, recipe)
    if (output / "state.json").exists():
        print(f"{output} is finished.")
        return
    pieces = [
        (shard, first, min(first + ROWS, rows))
        for shard, rows in tqdm([(shard, sum(shard.counts)) for shard in sources.shards(recipe.data)], leave=False)
        for first in range(0, rows, ROWS)
    ]
    make_folder(output)
    recipes.write(output / "recipe.yaml", recipe)
    tokenizer.save_pretrained(output)
    names = [f"data-{i:05d}-of-{len(pieces):05d}.arrow" for i in range(len(pieces))]
    left = [(name, piece) for name, piece in zip(names, pieces, strict=True) if not (output / name).exists()]
    jobs = [(*piece, str(output / name), recipe.on_bad_data == "skip") for name, piece in left]
    done = tqdm(total=len(pieces), initial=len(pieces) - len(jobs), unit="file", desc=str(output))
    if recipe.processes == 1:
        for job in jobs:
            _encode(*job)
            done.update()
    else:
        # spawned: threads of the tokenizer and of a connection to the Hub do not survive a fork
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(recipe.processes, context, _one_thread) as pool:
            try:
                for job in concurrent.futures.as_completed([pool.submit(_encode, *job) for job in jobs]):
                    job.result()
                    done.update()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    done.close()
    sizes = [len(datasets.Dataset.from_file(str(output / name))) for name in names]
    _describe(output, tokenizer, names)
    print(f"{output}: {sum(sizes):,} documents in {len(names):,} files")


def _one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def _features(entries: int) -> datasets.Features:
    # Two bytes a token hold every vocabulary up to that of nanochat.
    return datasets.Features({"input_ids": datasets.List(datasets.Value("uint16" if entries <= 2**16 else "int32"))})


def _encode(shard, first: int, stop: int, path: str, skip: bool) -> None:
    """Write the tokens of a shard's rows into an Arrow file, which appears when it is complete."""
    folder = Path(path).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    schema = _features(len(tokenizer)).arrow_schema
    stream = Stream(shards=[Part(shard, first, stop)], seed="", window=0, skip=skip, convert=text_or_tokens)
    sequences = (ids for ids, _ in DocumentStream(stream, tokenizer).sequences(epochs=1))
    part = Path(path + ".part")
    with pyarrow.OSFile(str(part), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:
        while batch := list(itertools.islice(sequences, 1000)):
            writer.write_batch(pyarrow.record_batch([pyarrow.array(batch, schema.types[0])], schema))
    part.replace(path)


def _describe(output: Path, tokenizer, names: list[str]) -> None:
    """Make the Arrow files a saved dataset: with the description of an empty one, which then names them."""
    empty = output / "empty.part"
    shutil.rmtree(empty, ignore_errors=True)
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"input_ids": []}, _features(len(tokenizer))).save_to_disk(str(empty))
    state = json.loads((empty / "state.json").read_text())
    (empty / "dataset_info.json").replace(output / "dataset_info.json")
    shutil.rmtree(empty)
    write(output / "state.json", {**state, "_data_files": [{"filename": name} for name in names]})


def check_prepared(data: str | list[str], tokenizer) -> None:
    """Raise ValueError if one of the sources is a prepared corpus, or a file of one, of another tokenizer."""
    for source in sources.listed(data):
        for folder in (Path(source).expanduser(), Path(source).expanduser().parent):
            if (folder / "tokenizer.json").is_file() and list(folder.glob("data-*.arrow")):
                written = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).backend_tokenizer.to_str()
                if written != tokenizer.backend_tokenizer.to_str():
                    raise ValueError(f"data: {source} was prepared with another tokenizer; give tokenizer={folder}.")
