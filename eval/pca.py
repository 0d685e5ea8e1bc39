"""The verb pca: principal components of patches as colours, and how well they find the foreground."""

import base64
import dataclasses
import io
import itertools
from pathlib import Path

import jinja2
import numpy as np
import PIL.Image
import torch
from accelerate import PartialState
from scipy.cluster.vq import kmeans, vq
from torch.nn.functional import interpolate
from tqdm import tqdm

from laplacian_heads import files
from laplacian_heads.eval import features, masks, plots
from laplacian_heads.eval.geometry import Spectrum
from laplacian_heads.eval.geometry_report import markdown_table
from laplacian_heads.eval.measure import heads, short
from laplacian_heads.eval.results import results_folder

COMPONENTS = 3  # red, green and blue
CLIPPED = (1, 99)  # percentiles that are the darkest and the brightest of a colour
MOST_CLUSTERS = 8  # of whose unions each is tried
ELONGATED = 8  # a picture with a side longer than this many times the other would have too many patches
SHOWN = 360  # pixels of the longer side of a picture in the report
EXPLAINED = (
    "Each patch is a cell. Its red, green and blue are the first three principal components of the patches of all "
    "pictures, after the model's final norm; the 1st percentile is dark and the 99th bright. "
)
BASES = {
    "per_model": "Each model has its own components. Those of further models stand in the order, and have the signs, "
    "with which they correlate most with the first model's, so that colours can be compared.",
    "shared": "The components are those of the patches of all models together.",
}
NUMBERS = (
    "IoU is that of the pixels of all pictures, in the masks' own size, to which components are enlarged. Of the first "
    "component it is that of the better side of Otsu's threshold, of k-means that of the best union of clusters: both "
    "are chosen with the masks. All: what calling every pixel foreground gives."
)


@dataclasses.dataclass
class PcaRecipe:
    """Keys of `recipes/pca.yaml`, which says what they mean."""

    models: list | None
    data: str | None
    pictures: int
    image_size: int
    basis: str
    threshold: float | None
    invert: bool
    mask: str | None
    foreground: list | None
    ignore_index: int
    clusters: int
    seed: int
    output: str | None
    trust_remote_code: bool

    def __post_init__(self):
        if not self.models or not all(isinstance(model, str) and model for model in self.models):
            raise ValueError(f"models is {self.models}, allowed is a list of model folders and ids of the Hub.")
        if len({Path(model).expanduser().absolute() for model in self.models}) < len(self.models):
            raise ValueError(f"models is {self.models}, allowed is each model once.")
        if not self.data:
            raise ValueError(f"data is {self.data!r}, allowed is what recipes/pca.yaml says of it.")
        if self.output == "":
            raise ValueError("output is '', allowed is the path of a folder, or null.")
        for name in ("pictures", "image_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, allowed is at least 1.")
        if self.basis not in BASES:
            raise ValueError(f"basis is {self.basis!r}, allowed are {' and '.join(BASES)}.")
        if self.threshold is not None and not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}, allowed is a number from 0 to 1, or null.")
        if self.foreground is not None and not (
            self.foreground and all(isinstance(label, int) and not isinstance(label, bool) for label in self.foreground)
        ):
            raise ValueError(f"foreground is {self.foreground}, allowed is a list of labels, or null.")
        if not 2 <= self.clusters <= MOST_CLUSTERS:
            raise ValueError(f"clusters is {self.clusters}, allowed is 2 to {MOST_CLUSTERS}.")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}, allowed is at least 0.")


@dataclasses.dataclass
class Picture:
    """A picture, its name, and if the data have masks (height, width) where the foreground is and what counts."""

    name: str
    image: PIL.Image.Image
    foreground: torch.Tensor | None = None
    counted: torch.Tensor | None = None


@dataclasses.dataclass
class Components:
    """Principal components of a model's patches.

    Args:
        maps: for each picture (rows, columns, 3).
        shares: of the variance, those of the components.
        order, signs: which of the model's own components the three are, from 0, and with which sign.
    """

    maps: list[torch.Tensor]
    shares: list[float]
    order: tuple[int, ...] = tuple(range(COMPONENTS))
    signs: tuple[int, ...] = (1,) * COMPONENTS

    def first(self) -> list[torch.Tensor]:
        """For each picture (rows, columns), the component with the largest variance."""
        place = self.order.index(0)
        return [each[..., place] for each in self.maps]


def pca(recipe: PcaRecipe, dry_run: bool = False) -> None:
    """Write the colours of models' patches as report.html and as pca.png, and figures as pca.json.

    Raises:
        ValueError: a value of the recipe, its data or a model is not allowed.
        OSError: a model cannot be read, or a file not written.
    """
    several = len(recipe.models) > 1
    folders = {model: files.newest(model) for model in recipe.models}
    if several:
        folder = Path(recipe.output or "runs/pca").expanduser()
    else:
        folder = results_folder(folders[recipe.models[0]], recipe.output) / "pca"
    if not PartialState(cpu=not torch.accelerator.is_available()).is_main_process:
        return
    print(f"{', '.join(folders.values())}: {recipe.pictures} pictures of {recipe.data}, into {folder}")
    if dry_run:
        return
    pictures = _pictures(recipe)
    files.check_writable(folder)
    shown = short(recipe.models)
    tokens, about = {}, {}
    for model, place in folders.items():
        backbone = features.load(place, recipe.trust_remote_code)
        name = shown[model]
        tokens[name] = _tokens(backbone, pictures, recipe.image_size, name)
        about[name] = {
            "model": model,
            "weights": backbone.weights,
            "laplacian_heads": heads(backbone.model.config),
            "patch": list(backbone.patch),
        }
    found = components(tokens, recipe.basis)
    colours = _colours(found, recipe)
    for name, each in found.items():
        about[name] |= {"variance_shares": each.shares, "order": each.order, "signs": each.signs}
        if pictures[0].foreground is not None:
            about[name] |= foreground_figures(each, pictures, recipe.clusters, recipe.seed)
    written = {
        "data": recipe.data,
        "pictures": [picture.name for picture in pictures],
        **{key: getattr(recipe, key) for key in ("image_size", "basis", "foreground", "clusters", "seed")},
        "models": about,
    }
    if pictures[0].foreground is not None:
        written["all_foreground_iou"] = _share(pictures)
    files.write(folder / "pca.json", written)
    titles = {name: f"{name}, {_laplacian(each['laplacian_heads'])}" for name, each in about.items()}
    _plate(pictures, colours, titles, folder / "pca.png")
    table = _table(written)
    _report(pictures, colours, titles, table, recipe, folder / "report.html")
    print("\n" + markdown_table(*table))
    print(f"\n{folder / 'report.html'}")


def _pictures(recipe: PcaRecipe) -> list[Picture]:
    source = masks.load(recipe.data, recipe.mask, needed=False, drawn=recipe.pictures)
    if not len(source):
        raise ValueError(f"data: {recipe.data} has no pictures.")
    numbers = sorted(np.random.default_rng(0).permutation(len(source))[: recipe.pictures].tolist())
    found = []
    for number in numbers:
        if source.mask is None:
            found.append(Picture(source.called(number), source.picture(number)))
            continue
        image, mask = source.pair(number)
        labels = torch.from_numpy(mask)
        foreground = labels != 0 if recipe.foreground is None else torch.isin(labels, torch.tensor(recipe.foreground))
        found.append(Picture(source.called(number), image, foreground, labels != recipe.ignore_index))
    for picture in found:
        if max(picture.image.size) > ELONGATED * min(picture.image.size):
            size = " x ".join(map(str, picture.image.size))
            raise ValueError(
                f"data: {picture.name} is {size}, allowed is a side {ELONGATED} times as long as the other."
            )
    if source.mask and not any((picture.foreground & picture.counted).any() for picture in found):
        raise ValueError(f"foreground is {recipe.foreground}, allowed are labels that the drawn masks have.")
    return found


def _tokens(backbone: features.Backbone, pictures: list[Picture], image_size: int, name: str) -> list[torch.Tensor]:
    """For each picture (rows, columns, width), its patches after the final norm."""
    found = []
    for picture in tqdm(pictures, name, unit="picture", leave=False):
        factor = image_size / min(picture.image.size)
        height, width = (
            max(round(side * factor / patch), 1) * patch
            for side, patch in zip(picture.image.size[::-1], backbone.patch, strict=True)
        )
        resized = picture.image.resize((width, height), PIL.Image.Resampling.BICUBIC)
        tokens = backbone.tokens(masks.pixel_values(resized, backbone.processor)[None])
        found.append(tokens.patches[0][0].unflatten(0, tokens.grid).cpu())
    return found


def components(tokens: dict[str, list[torch.Tensor]], basis: str) -> dict[str, Components]:
    """The first three principal components of the patches of each model.

    Args:
        tokens: of each model for each picture (rows, columns, width), of the same pictures.
        basis: "per_model", further models' in the order and with the signs that fit the first one's; or "shared".

    Raises:
        ValueError: a shared basis is asked for models of different widths.
    """
    if basis == "shared":
        widths = {name: maps[0].shape[-1] for name, maps in tokens.items()}
        if len(set(widths.values())) > 1:
            said = ", ".join(f"{width} of {name}" for name, width in widths.items())
            raise ValueError(f"basis is shared, allowed for models of one width; there are {said}.")
        spectrum = _spectrum([each for maps in tokens.values() for each in maps])
        return {name: _projected(maps, spectrum) for name, maps in tokens.items()}
    found = {name: _projected(maps, _spectrum(maps)) for name, maps in tokens.items()}
    first, *others = found
    return {first: found[first]} | {name: _aligned(found[name], found[first]) for name in others}


def _spectrum(maps: list[torch.Tensor]) -> Spectrum:
    spectrum = Spectrum()
    for each in maps:
        spectrum.update(each.flatten(0, 1)[None])
    return spectrum


def _projected(maps: list[torch.Tensor], spectrum: Spectrum) -> Components:
    eigenvalues, directions = spectrum.principal()
    centre, directions = spectrum.pooled.means[0], directions[:COMPONENTS]
    shares = (eigenvalues / eigenvalues.sum()).nan_to_num()[:COMPONENTS].tolist()
    return Components([(each.double() - centre) @ directions.mT for each in maps], shares)


def _aligned(other: Components, first: Components) -> Components:
    """Another model's components in the order and with the signs that correlate most with the first one's."""
    sized = [_sized(each, one.shape[:2]) for each, one in zip(other.maps, first.maps, strict=True)]
    both = [torch.cat([each.flatten(0, 1) for each in maps]) for maps in (first.maps, sized)]
    both = [torch.nn.functional.normalize(each - each.mean(0), dim=0) for each in both]
    cosines = both[0].mT @ both[1]  # a row for each component of the first model
    order = max(
        itertools.permutations(range(COMPONENTS)),
        key=lambda order: sum(abs(cosines[row, column].item()) for row, column in enumerate(order)),
    )
    signs = tuple(-1 if cosines[row, column] < 0 else 1 for row, column in enumerate(order))
    maps = [each[..., list(order)] * torch.tensor(signs) for each in other.maps]
    return Components(maps, other.shares, order, signs)


def _sized(maps: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """(rows, columns, components) in another size."""
    return interpolate(maps.permute(2, 0, 1)[None], tuple(size), mode="bilinear")[0].permute(1, 2, 0)


def _colours(found: dict[str, Components], recipe: PcaRecipe) -> dict[str, list[np.ndarray]]:
    """For each model and picture (rows, columns, 3) from 0 to 1, black where there is no foreground."""
    fronts = {name: _front(each, recipe) for name, each in found.items()}
    values = {
        name: torch.cat([maps[front] for maps, front in zip(each.maps, fronts[name], strict=True)]).numpy()
        for name, each in found.items()
    }
    if recipe.basis == "shared":
        values = dict.fromkeys(found, np.concatenate(list(values.values())))
    colours = {}
    for name, each in found.items():
        low, high = np.percentile(values[name], CLIPPED, axis=0) if len(values[name]) else (0, 1)
        scaled = [((maps.numpy() - low) / np.maximum(high - low, 1e-12)).clip(0, 1) for maps in each.maps]
        colours[name] = [
            np.where(front.numpy()[..., None], maps, 0) for maps, front in zip(scaled, fronts[name], strict=True)
        ]
    return colours


def _front(found: Components, recipe: PcaRecipe) -> list[torch.Tensor]:
    """For each picture (rows, columns), which patches have colours."""
    first = found.first()
    if recipe.threshold is None:
        return [torch.ones_like(each, dtype=torch.bool) for each in first]
    low, high = min(each.min() for each in first), max(each.max() for each in first)
    scaled = [(each - low) / (high - low).clamp(min=1e-12) for each in first]
    return [each < recipe.threshold if recipe.invert else each > recipe.threshold for each in scaled]


def otsu(values: np.ndarray) -> float:
    """The threshold between values that leaves the most variance between the two sides, in the middle of a gap.

    Source: Otsu, "A threshold selection method from gray-level histograms" (1979), without a histogram.
    """
    values = np.sort(values.astype(np.float64), axis=None)
    below = np.arange(1, len(values))
    between = np.cumsum(values - values.mean())[:-1] ** 2 / (below * (len(values) - below))
    between[values[:-1] == values[1:]] = -1  # equal ones lie on one side
    if not len(between) or between.max() < 0:
        return float(values[0])
    best = int(between.argmax())
    return float((values[best] + values[best + 1]) / 2)


def foreground_figures(found: Components, pictures: list[Picture], clusters: int, seed: int) -> dict:
    """How well components find the foreground, in the masks' own size.

    Args:
        found: of a model.
        pictures: with foreground.
        clusters, seed: of k-means.

    Returns:
        first_component: of the two sides of Otsu's threshold the better one; kmeans: the best union of clusters. Each
        with iou, of all pixels together, mean_picture_iou, of the pictures with foreground, and parts, which were
        taken: 0 below and 1 above the threshold, or the clusters.
    """
    first = [each[..., None] for each in found.first()]
    values = torch.cat([each.flatten() for each in first]).numpy()
    threshold = otsu(values)
    points = torch.cat([each.flatten(0, 1) for each in found.maps]).numpy()
    centres, _ = kmeans(points, clusters, rng=np.random.default_rng(seed))
    sides, groups = [], []  # for each picture (parts, 2), pixels that are and are not foreground
    for picture, one, maps in zip(pictures, first, found.maps, strict=True):
        size, counted = picture.foreground.shape, picture.counted
        right = picture.foreground[counted].long()
        above = (_sized(one, size)[..., 0] > threshold)[counted].long()
        sides.append(torch.bincount(above * 2 + right, minlength=4).view(2, 2))
        nearest, _ = vq(_sized(maps, size)[counted].numpy(), centres)
        nearest = torch.from_numpy(nearest).long()
        groups.append(torch.bincount(nearest * 2 + right, minlength=2 * len(centres)).view(-1, 2))
    return {
        "first_component": {**best_union(torch.stack(sides)), "threshold": threshold},
        "kmeans": {**best_union(torch.stack(groups)), "centres": centres.tolist()},
    }


def best_union(counts: torch.Tensor) -> dict:
    """The union of some parts that agrees best with the foreground.

    Args:
        counts: (pictures, parts, 2), pixels of the background and of the foreground.

    Returns:
        iou, mean_picture_iou and parts, as `foreground_figures` says.
    """

    def ious(counts, parts):  # (..., parts, 2)
        taken = counts[..., list(parts), :].sum(-2)
        missed = counts[..., 1].sum(-1) - taken[..., 1]
        return taken[..., 1].double() / (taken.sum(-1) + missed)

    count = counts.shape[1]
    unions = [parts for size in range(1, count) for parts in itertools.combinations(range(count), size)] or [(0,)]
    parts = max(unions, key=lambda parts: ious(counts.sum(0), parts).item())
    each = ious(counts, parts)[counts[..., 1].sum(1) > 0]
    return {"iou": ious(counts.sum(0), parts).item(), "mean_picture_iou": each.mean().item(), "parts": list(parts)}


def _share(pictures: list[Picture]) -> float:
    """Of the pixels that count those of the foreground: the IoU of calling all of them so."""
    right = sum((picture.foreground & picture.counted).sum().item() for picture in pictures)
    return right / sum(picture.counted.sum().item() for picture in pictures)


def _laplacian(heads: list[list[int]] | None) -> str:
    """How many heads of a layer are Laplacian, in words."""
    counts = [len(layer) for layer in heads or []]
    if not any(counts):
        return "no Laplacian heads"
    if len(set(counts)) == 1:
        return f"{counts[0]} Laplacian heads in each layer"
    return f"Laplacian heads by layer: {', '.join(map(str, counts))}"


def _table(written: dict) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table of figures."""
    heads, rows = ["model", "variance of three components"], []
    measured = "all_foreground_iou" in written
    if measured:
        heads += ["IoU, first component", "IoU, k-means"]
    for name, each in written["models"].items():
        row = [name, f"{sum(each['variance_shares']):.1%}"]
        if measured:
            row += [f"{each[key]['iou']:.4f}" for key in ("first_component", "kmeans")]
        rows.append(row)
    if measured:
        rows.append(["all", "", *[f"{written['all_foreground_iou']:.4f}"] * 2])
    return heads, rows


def _plate(pictures: list[Picture], colours: dict, titles: dict[str, str], path: Path) -> None:
    columns = 1 + len(titles)
    figure, all_axes = plots.panels(len(pictures) * columns, columns=columns, width=3 * columns, height=2.5)
    for row, picture in enumerate(pictures):
        drawn = [np.asarray(_small(picture.image)), *(each[row] for each in colours.values())]
        extent = (0, picture.image.width, picture.image.height, 0)
        for column, image in enumerate(drawn):
            axes = all_axes[row * columns + column]
            axes.imshow(image, interpolation="nearest", extent=extent)
            axes.set_axis_off()
            if row == 0:
                axes.set_title(plots.written(["picture", *titles.values()][column], 32))
    plots.write(figure, path)


def _report(pictures, colours, titles: dict[str, str], table: tuple, recipe: PcaRecipe, path: Path) -> None:
    # autoescape: names of models and pictures are anybody's.
    templates = jinja2.FileSystemLoader(Path(__file__).parent)
    templates = jinja2.Environment(loader=templates, autoescape=True, undefined=jinja2.StrictUndefined)
    # Of a path the name: reports are published.
    data = Path(recipe.data).name if Path(recipe.data).is_absolute() else recipe.data
    rows = [
        (
            picture.name.replace(recipe.data, data),
            _encoded(_small(picture.image)),
            [_encoded(PIL.Image.fromarray((each[row] * 255).round().astype(np.uint8))) for each in colours.values()],
        )
        for row, picture in enumerate(pictures)
    ]
    meanings = [EXPLAINED + BASES[recipe.basis]]
    if recipe.threshold is not None:
        side = "below" if recipe.invert else "above"
        meanings.append(
            f"Black are the patches whose first component, from 0 to 1 over all pictures, is not {side} "
            f"{recipe.threshold}."
        )
    if pictures[0].foreground is not None:
        meanings.append(NUMBERS)
    page = templates.get_template("pca.html.jinja").render(
        titles=titles, rows=rows, heads=table[0], table=table[1], meanings=meanings
    )
    files.write(path, page)


def _small(image: PIL.Image.Image) -> PIL.Image.Image:
    image = image.copy()
    image.thumbnail((SHOWN, SHOWN))
    return image


def _encoded(image: PIL.Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()
