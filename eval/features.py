"""Frozen features: the tokens of a vision transformer's last blocks, after its final norm, for images of a source."""

import dataclasses
import inspect
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import PIL.Image
import torch
from accelerate import PartialState
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoImageProcessor, AutoModel, PreTrainedModel
from transformers.utils import cached_file, logging

from laplacian_heads.configuration import pair
from laplacian_heads.files import newest, weights_hash
from laplacian_heads.images import BadImageError, Images, Readable

SHAPE = ("hidden_size", "num_hidden_layers", "patch_size")
NORMS = ("layernorm", "norm", "post_layernorm", "layer_norm")  # what models call the norm after their last block
UNUSED = ("pooler", "mask_token")  # weights on which no token depends, and which many are saved without


@dataclasses.dataclass
class Tokens:
    """Tokens of some blocks, each after the model's final norm, in float32.

    Args:
        cls: of each block (images, width), the class token; of a model without one the mean of the patches.
        patches: of each block (images, rows * columns, width), row by row.
        grid: rows and columns of patches.
    """

    cls: list[torch.Tensor]
    patches: list[torch.Tensor]
    grid: tuple[int, int]


class Backbone:
    """A frozen vision transformer, as `load` makes it.

    It is no module, so that what is trained on its features does not have it among its weights.

    Attributes:
        name: its folder or its name on the Hub.
        weights: `files.weights_hash` of its folder, or of its files from the Hub.
        model: without a head, in evaluation mode and float32.
        processor: makes pixel values of images.
        patch: height and width of a patch, in pixels.
        width: of a token.
        depth: number of blocks.
        bf16: whether matrices are multiplied in bfloat16.
    """

    def __init__(self, name: str, model: PreTrainedModel, processor, bf16: bool = False):
        self.name, self.model, self.processor, self.bf16 = name, model, processor, bf16
        self.weights = weights_hash(Path(cached_file(str(Path(name).expanduser()), "config.json")).parent)
        self.patch = pair(model.config.patch_size)
        self.width, self.depth = model.config.hidden_size, model.config.num_hidden_layers
        norms = [norm for name in NORMS if (norm := getattr(model, name, None)) is not None]
        if not norms or isinstance(norms[0], torch.nn.Identity):
            raise ValueError(f"{name} is a {type(model).__name__}, which has no final norm for its tokens.")
        self.norm = norms[0]
        takes = inspect.signature(model.forward).parameters
        self.asked = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in takes else {}

    # Not inference_mode, of whose tensors nothing can learn.
    @torch.no_grad()
    def tokens(self, pixel_values: torch.Tensor, blocks: int | list[int] = 1) -> Tokens:
        """Tokens of images.

        Args:
            pixel_values: (images, 3, height, width), of any size that the model takes.
            blocks: so many of the last blocks, or the numbers of blocks, counted from 1.

        Raises:
            ValueError: a block that is not there, or the model does not give a token for each patch.
        """
        chosen = list(range(self.depth - blocks + 1, self.depth + 1)) if isinstance(blocks, int) else blocks
        if not chosen or not all(1 <= block <= self.depth for block in chosen):
            raise ValueError(f"blocks is {blocks}, allowed is 1 to {self.depth}, the blocks of {self.name}.")
        caught = []
        hook = self.norm.register_forward_hook(lambda _, given, normed: caught.append(normed))
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            try:
                output = self.model(pixel_values.to(device), output_hidden_states=True, **self.asked)
            finally:
                hook.remove()
            hidden = output.hidden_states or ()  # of the embedding and of each block, the last maybe normed already
            if len(hidden) != self.depth + 1 or any(each.shape != hidden[-1].shape for each in hidden):
                raise ValueError(f"{self.name} does not give the hidden states of {self.depth} blocks of one size.")
            if len(caught) != 1 or caught[0].shape != hidden[-1].shape:
                raise ValueError(f"{self.name} does not put the tokens of its last block through its final norm.")
            states = [caught[0] if block == self.depth else self.norm(hidden[block]) for block in chosen]
        rows, columns = (side // patch for side, patch in zip(pixel_values.shape[2:], self.patch, strict=True))
        before = hidden[-1].shape[1] - rows * columns  # the class token, DeiT's token of distillation, registers
        if not 0 <= before <= 2 + (getattr(self.model.config, "num_register_tokens", 0) or 0):
            raise ValueError(
                f"{self.name} gives {hidden[-1].shape[1]} tokens for {rows} x {columns} patches, allowed is one for "
                "each and a few before them."
            )
        states = [state.float() for state in states]
        patches = [state[:, before:] for state in states]
        cls = [state[:, 0] for state in states] if before else [each.mean(1) for each in patches]
        return Tokens(cls, patches, (rows, columns))


def load(
    name: str, trust_remote_code: bool = False, device: torch.device | str | None = None, bf16: bool = False
) -> Backbone:
    """A vision transformer of transformers, with or without a head, and its image processor.

    Args:
        name: its folder, or its name on the Hub; of a run that is still in training the newest checkpoint is taken.
        trust_remote_code: whether code that comes with it may run.
        device: where it computes; None is the accelerator of this process, or the processor if there is none.
        bf16: whether it multiplies matrices in bfloat16; its tokens are float32 in any case.

    Raises:
        ValueError: it cannot be read, or is no vision transformer whose tokens can be had.
    """
    name = newest(name)
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:  # of which not all name the model
        if "trust_remote_code" in str(error):
            raise ValueError(f"{name} comes with code of its own: --trust_remote_code lets it run.") from None
        message = " ".join(str(error).split())
        raise ValueError(f"{name} cannot be read, neither as a folder nor from the Hub: {message}") from error
    lacking = [key for key in SHAPE if getattr(config, key, None) is None]
    if lacking:
        raise ValueError(
            f"{name} is a {config.model_type} without {lacking[0]}, allowed are vision transformers such as ViT, DeiT, "
            "DINOv2 and LaplaceViT."
        )
    if getattr(config, "mask_ratio", None):
        raise ValueError(f"{name} is a {config.model_type}, which leaves out patches at random.")
    if getattr(config, "num_channels", 3) != 3:
        raise ValueError(f"{name} reads images of {config.num_channels} channels, allowed are 3.")
    asked = {"trust_remote_code": trust_remote_code, "output_loading_info": True, "dtype": torch.float32}
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it warns of a head that is left out
    try:
        model, loading = AutoModel.from_pretrained(name, **asked)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{name} cannot be read: {' '.join(str(error).split())}") from error
    finally:
        logging.set_verbosity(verbosity)
    for weight in sorted({*loading["missing_keys"], *loading["mismatched_keys"]}):
        if not any(part in str(weight) for part in UNUSED):
            raise ValueError(f"The weight {weight} of {name} is missing or of another shape.")
    for weight, values in model.state_dict().items():
        if not values.isfinite().all():
            raise ValueError(f"The weight {weight} of {name} is not finite everywhere.")
    if model.main_input_name != "pixel_values":
        raise ValueError(f"{name} reads {model.main_input_name}, allowed are models of images alone.")
    try:
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"There is no image processor in {name} ({' '.join(str(error).split())[:200]}).") from error
    device = device or PartialState(cpu=not torch.accelerator.is_available()).device
    backbone = Backbone(name, model.to(device).eval().requires_grad_(False), processor, bf16)
    _try(backbone)
    return backbone


def _try(backbone: Backbone) -> None:
    """Raise ValueError now rather than amid the work if a model does not give what is needed of it."""
    picture = PIL.Image.new("RGB", (64, 64), "grey")
    try:
        values = backbone.processor(picture, return_tensors="pt")["pixel_values"]
        backbone.tokens(values, backbone.depth)
    except Exception as error:  # whatever a model of anybody says to inputs that it does not take
        if isinstance(error, ValueError) and str(error).startswith(backbone.name):
            raise
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"{backbone.name} does not take images as its processor makes them ({what}).") from error


class Pictures(Readable, torch.utils.data.Dataset):
    """Images as tensors with their labels. Of a damaged image a row is None, or the error that is to be raised.

    Args:
        images: by number.
        transform: makes a (3, height, width) tensor of an RGB image.
        skip: whether damaged images are left out, with a warning, or are errors.
    """

    def __init__(self, images: Images, transform: Callable[[PIL.Image.Image], torch.Tensor], skip: bool):
        super().__init__(images, skip)
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int] | BadImageError | None:
        """(3, height, width) and the label, -1 if the images have none."""
        picture = self.read(number)
        if picture is None or isinstance(picture, BadImageError):
            return picture
        return self.transform(picture), self.label(number)


class Processed:
    """What an image processor makes of one image; a class, so that it can be sent to other processes.

    Args:
        processor: of transformers.
        options: what it shall do otherwise, such as do_resize=False.
    """

    def __init__(self, processor, **options):
        self.processor, self.options = processor, options

    def __call__(self, picture: PIL.Image.Image) -> torch.Tensor:
        return self.processor(picture, return_tensors="pt", **self.options)["pixel_values"][0]


def stream(
    backbone: Backbone,
    images: Images,
    blocks: int | list[int],
    batch_size: int,
    workers: int = 0,
    skip: bool = True,
    what: str = "features",
) -> Iterator[tuple[Tokens, torch.Tensor]]:
    """Tokens of images, batch by batch, each as the model's own image processor makes it, with a progress bar.

    Several processes take turns with the images: each gets its own ones.

    Args:
        blocks: as `Backbone.tokens` takes them.
        batch_size: images in a forward pass.
        workers: processes that decode for this one; 0 is this one itself.
        skip: whether damaged images are left out, with a warning, or raise BadImageError.
        what: the progress bar says.

    Yields:
        Tokens and (images,) labels, -1 where there are none.

    Raises:
        BadImageError: an image is damaged, and such are not left out.
        ValueError: the image processor makes images of different sizes.
    """
    state = PartialState(cpu=not torch.accelerator.is_available())
    loader = torch.utils.data.DataLoader(
        Pictures(images, Processed(backbone.processor), skip),
        sampler=range(state.process_index, len(images), state.num_processes),
        batch_size=batch_size,
        collate_fn=collate,
        num_workers=workers,
        worker_init_fn=begin_worker,
        generator=torch.Generator(),  # of its own: the random state of the process stays as it is
    )
    for batch in tqdm(loader, what, unit="batch", leave=False, disable=not state.is_main_process or len(loader) < 20):
        if isinstance(batch, Exception):
            raise batch
        if batch is not None:
            yield backbone.tokens(batch["pixel_values"], blocks), batch["labels"]


def collate(rows: list) -> dict[str, torch.Tensor] | Exception | None:
    """Rows of `Pictures` as pixel_values (images, 3, height, width) and labels (images,), None if all are left out; or
    the error to raise, which would lose its words on its way from another process."""
    errors = [row for row in rows if isinstance(row, Exception)]
    rows = [row for row in rows if row is not None]
    if errors or not rows:
        return errors[0] if errors else None
    pictures, labels = zip(*rows, strict=True)
    sizes = sorted({tuple(picture.shape[1:]) for picture in pictures})
    if len(sizes) > 1:
        (height, width), (other_height, other_width) = sizes[0], sizes[-1]
        return ValueError(
            f"The image processor makes images of {height} x {width} and of {other_height} x {other_width} pixels, "
            "allowed is one size."
        )
    return {"pixel_values": torch.stack(pictures), "labels": torch.tensor(labels)}


def begin_worker(worker: int) -> None:
    """What a process that decodes for another does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that reads from it decides when it ends
    torch.set_num_threads(1)
