"""Recipes: one commented YAML file per run, shipped with the package, and the function that reads them."""

import dataclasses
import difflib
import re
import types
import typing
from pathlib import Path

import yaml

from laplacian_heads import files

SHIPPED = Path(__file__).parent


class Loader(yaml.SafeLoader):
    """YAML as people write it: 2e-4 is a number."""


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def path_of(name: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped one. Raises ValueError naming the nearest shipped name."""
    shipped = {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.is_file():
        return path
    raise ValueError(f"There is no recipe {name!r}, neither a file nor a shipped one; {nearest(name, shipped)}")


def nearest(name: str, choices) -> str:
    """'the nearest is x.' or, where nothing is near, 'there are x, y, z.', unless there are very many."""
    near = difflib.get_close_matches(name, choices, n=1)
    if near:
        return f"the nearest is {near[0]!r}."
    return f"there are {', '.join(choices)}." if len(choices) <= 100 else f"none of the {len(choices):,} is near."


def parse(overrides: list[str]) -> dict:
    """ "key=value" strings as a dict, values read as YAML. Raises ValueError for a string that is not of this form."""
    values = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ValueError(f"{override!r} is not of the form key=value.")
        try:
            values[key] = yaml.load(value, Loader)
        except yaml.YAMLError:
            raise ValueError(f"{key}={value} is not a YAML value.") from None
    return values


def load(recipe_class: type, name: str, overrides: dict | None = None):
    """Read a recipe into its dataclass.

    Args:
        recipe_class: a dataclass; its annotations are the allowed types of the keys.
        name: a file, or the name of a shipped recipe.
        overrides: keys to set otherwise; "block.key" sets a key of a block.

    Raises:
        ValueError: unknown recipe or key, a value of a wrong type, a missing key, or a file that is not YAML.
    """
    path = path_of(name)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not a YAML file: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is not a recipe: it must hold keys and values.")
    for key, value in (overrides or {}).items():
        *blocks, last = key.split(".")
        place = values
        for block in blocks:
            place = place.get(block)
            if not isinstance(place, dict):
                raise ValueError(f"{path.stem} has no block {block!r}, of which {key} would be a key.")
        place[last] = value

    annotations = typing.get_type_hints(recipe_class)
    for key in values:
        if key not in annotations:
            raise ValueError(f"{path.stem} knows no key {key!r}; {nearest(str(key), annotations)}")
    values = {key: _checked(key, value, annotations[key]) for key, value in values.items()}
    missing = [field.name for field in dataclasses.fields(recipe_class) if field.name not in values]
    if missing:
        raise ValueError(f"{path} lacks the key {missing[0]!r}.")
    return recipe_class(**values)


def _checked(key, value, annotation):
    allowed = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if isinstance(value, int) and not isinstance(value, bool) and float in allowed:
        return float(value)
    kinds = tuple(typing.get_origin(kind) or kind for kind in allowed)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("null" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"{key} is {value!r}, allowed is {names}.")
    return value


def write(path: Path, recipe) -> None:
    """Write a recipe beside its results, as a whole or not at all."""
    files.write(path, yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False))


def read(path: Path) -> dict | None:
    """The values of a recipe that `write` wrote; None if the file is not there or is damaged."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return None


def check_output(output: Path, recipe) -> None:
    """Raise ValueError if a folder holds anything but the results of this recipe, which may go on there.

    Where the folder itself lies does not matter: one that was moved goes on at its new place.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is a file, allowed is a folder.")
    names = {path.name for path in output.iterdir()} if output.is_dir() else set()
    if not names - {"recipe.yaml", "recipe.yaml.part", ".lock"}:
        return
    there, here = read(output / "recipe.yaml"), dataclasses.asdict(recipe)
    if not isinstance(there, dict):
        raise ValueError(f"output: {output} holds other files, and no recipe.yaml; give another output=.")
    for key in {**there, **here}:
        if key != "output" and there.get(key) != here.get(key):
            raise ValueError(
                f"output: {output} holds the results of another recipe, in which {key} is {there.get(key)!r} instead "
                f"of {here.get(key)!r}; give another output=."
            )
