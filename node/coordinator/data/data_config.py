"""Settings of a run's data."""

from pathlib import Path
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from node.coordinator.data.data_files import matching
from node.system.extras import NeededPackage


class DataSource(NamedTuple):
    path: Path
    split: str
    subset: str | None


class DataConfig(BaseModel):
    """Section ``[coordinator.data]``: the rows that prompts are made from."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    file: Path
    """JSON objects, one a line or in a list, each at most 256 KiB; a .csv or .tsv file with names in its
    first line; either also as .gz, .bz2 or .xz; a .parquet file, or a directory that ``datasets`` saved or
    that holds a data set as the Hub has it (these need the extra ``data``). A pattern such as
    "train-*.parquet" stands for all files that match. Samplers get each row with its lease; rows that cannot
    be used are left out. A run keeps its rows and their numbers; more may be added at the end, before a
    restart of the coordinator."""
    split: str = "train"
    """Which split, where a directory has several."""
    subset: str | None = None
    """Which subset, where a data set of the Hub has several, such as "main"."""
    evaluation_rows: int = Field(default=0, ge=0)
    """How many rows are never trained on: the last ones, unless they have a file or split of their own."""
    evaluation_file: Path | None = None
    """Where the first ``evaluation_rows`` are those to evaluate on; nothing of it is trained on."""
    evaluation_split: str | None = None
    """Which split of ``evaluation_file`` or, without one, of ``file``; unset: ``split``."""

    @model_validator(mode="after")
    def _is_coherent(self) -> Self:
        if self.evaluation_source is not None:
            if not self.evaluation_rows:
                raise ValueError(
                    "evaluation_file or evaluation_split is set, and evaluation_rows = 0 takes none of it; "
                    "set evaluation_rows to the number of rows to hold out"
                )
            if self.evaluation_source == self.source:
                raise ValueError(
                    "the rows to evaluate on are those to train on; "
                    "leave evaluation_file and evaluation_split out to hold out the last ones"
                )
        return self

    @property
    def source(self) -> DataSource:
        return DataSource(self.file, self.split, self.subset)

    @property
    def evaluation_source(self) -> DataSource | None:
        """Source of the held-out rows; None: the last rows of ``source``."""
        if self.evaluation_file is None and self.evaluation_split is None:
            return None
        return DataSource(self.evaluation_file or self.file, self.evaluation_split or self.split, self.subset)

    @property
    def paths(self) -> dict[str, Path]:
        """Key -> file or directory that is to be there."""
        evaluation = self.evaluation_file
        named = {
            "coordinator.data.file": self.file,
            **({} if evaluation is None else {"coordinator.data.evaluation_file": evaluation}),
        }
        return {key: next(iter(matching(path)), path) for key, path in named.items()}

    @property
    def needed_packages(self) -> tuple[NeededPackage, ...]:
        """The packages that read what is not JSONL."""
        return tuple(
            NeededPackage(key, str(path), package, extra="data")
            for key, path in self.paths.items()
            if (package := _package_for(path)) is not None
        )


def _package_for(path: Path) -> str | None:
    if path.is_dir():
        return "datasets"
    return "pyarrow" if path.suffix == ".parquet" else None
