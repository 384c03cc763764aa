"""Images of tasks: files by the hash of their content, from a dataset's cell to a model's input.

A task's images are parts of its chat, `{"type": "image", "image": NAME}`; their files are in `media/` of the run folder
from before the first experience that names them, and in a folder of each machine that uses them. A name is the SHA-256
of the file, so a file that is there is the right one, and nobody writes it twice.

In tokens an image is the run of tokens that the model's processor writes for it, in place of the one that the chat
template writes. No model samples that token: it would stand for an image that is not there.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftdask.errors import DamagedError, DataError, NotFoundError, UserError
from rftdask.models.hub import local_model
from rftdask.storage import Storage
from rftdask.storage.checked_json import parse_object

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

FOLDER = "media"
"""In the run folder."""
_NO_INPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Of what a processor makes: known here already."""
_MAGIC = {
    b"\x89PNG": "image/png",
    b"\xff\xd8": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
"""How files of images begin that browsers show."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What a model folder has beside model and tokenizer, so that it can be given images."""


def image_files(cell: Any, base: str) -> list[bytes]:
    """The files of the images in a dataset's cell: one, or a list of them.

    An image is bytes, {"bytes": ..., "path": ...} as `datasets` stores one, an image of PIL, a data URL, or the path of
    a file, from `base` if it is relative. Raises: DataError: it is something else, or not there.
    """
    if cell is None:
        return []
    if isinstance(cell, list | tuple):
        return [file for each in cell for file in image_files(each, base)]
    if isinstance(cell, Mapping):
        return image_files(cell.get("bytes") or cell.get("path"), base)
    if isinstance(cell, bytes):
        content = cell
    elif isinstance(cell, str) and cell.startswith("data:"):
        try:
            content = base64.b64decode(cell.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise DataError(f"an image is a data URL that is not base64: {cell:.60}") from error
    elif isinstance(cell, str) and "://" in cell:
        raise DataError(f"an image is an address, {cell:.100}; a run reads files: download it, and give its path")
    elif isinstance(cell, str):
        path = Path(base, cell).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"image {path} cannot be read: {error.strerror}") from error
    elif hasattr(cell, "save"):
        buffer = io.BytesIO()
        cell.save(buffer, format="PNG")  # the one format that every mode of PIL has and that loses nothing
        content = buffer.getvalue()
    else:
        raise DataError(f"an image is a {type(cell).__name__}; it is a file, its bytes, or an image of PIL")
    _decoded(content)
    return [content]


def name_of(content: bytes) -> str:
    """Of an image's file."""
    return sha256(content).hexdigest()


def data_url(content: bytes) -> str:
    """An image's file as a page shows it."""
    kind = next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _decoded(content: bytes) -> Image:
    """Raises: DataError: it is no image."""
    try:
        from PIL import Image  # late: few runs have images
    except ImportError as error:
        raise UserError("images need Pillow; run `pip install pillow`") from error
    try:
        return Image.open(io.BytesIO(content)).convert("RGB")
    except (OSError, ValueError) as error:
        raise DataError(f"an image of {len(content)} bytes cannot be read: {error}") from error


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the images in a chat, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    return tuple(part["image"] for part in parts if isinstance(part, Mapping) and part.get("type") == "image")


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The chat with its texts alone, for what reads no images."""

    def text(content: Any) -> Any:
        if not isinstance(content, list | tuple):
            return content
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") != "image")

    return tuple({**message, "content": text(message.get("content"))} for message in messages)


class ImageFolder:
    """Files of images on this machine, by their names, for the processes of this user."""

    def __init__(self, path: Path | None = None) -> None:
        """path: None: one for this user, which is kept between runs."""
        self._path = path or Path(tempfile.gettempdir(), f"rftdask-media-{os.getuid()}")
        self._path.mkdir(mode=0o700, exist_ok=True)
        if self._path.stat().st_uid != os.getuid():
            raise UserError(f"{self._path} belongs to another user; set TMPDIR")

    def put(self, content: bytes) -> str:
        """Its name."""
        name = name_of(content)
        if not self.holds(name):
            with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
                file.write(content)
            os.replace(file.name, self._path / name)
        return name

    def fetch(self, storage: Storage, names: Sequence[str]) -> None:
        """Have the files of a run's images here. Raises: DamagedError: one is missing there, or is another."""
        for name in dict.fromkeys(names):
            if self.holds(name):
                continue
            try:
                content = storage.get(f"{FOLDER}/{name}")
            except NotFoundError as error:
                raise DamagedError(f"{storage.url}/{FOLDER}/{name}, an image of an experience, is missing") from error
            if self.put(content) != name:
                raise DamagedError(f"{storage.url}/{FOLDER}/{name} is not the image whose hash it has for a name")

    def read(self, name: str) -> bytes:
        """The file. Raises: DamagedError: it is another, which then goes: it is made again from where it came."""
        content = (self._path / name).read_bytes()
        if name_of(content) != name:
            (self._path / name).unlink(missing_ok=True)
            raise DamagedError(f"{self._path / name} is not the image whose hash it has for a name; start again")
        return content

    def holds(self, name: str) -> bool:
        """Whether the file is here."""
        return (self._path / name).exists()


def can_be_given_images(model_path: str, model_types: Sequence[str] = ()) -> bool:
    """Whether a model is on this machine that reads images, with what prepares them. model_types: as below."""
    folder = Path(local_model(model_path))
    try:
        check_reads_images(model_path, model_types)
    except UserError:
        return False
    return (folder / "config.json").is_file()


def check_reads_images(model_path: str, model_types: Sequence[str] = ()) -> None:
    """model_types: those of which the engine reads images; none: of any.

    Raises: UserError: the model, if it is on this machine, reads no images, or lacks what prepares them, or the engine
        does not read them as its trainer does.
    """
    folder = Path(local_model(model_path))
    if not (folder / "config.json").is_file():
        return
    settings = parse_object((folder / "config.json").read_bytes())
    if "vision_config" not in settings:
        raise UserError(
            f"model.model_path: {model_path!r} reads no images, and a taskset has format.image_key; give a model that "
            "does, or leave it out"
        )
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        raise UserError(
            f"model.model_path: {model_path!r} has no {' or '.join(PROCESSOR_FILES[:2])}, which says how images become "
            f"its input; save one there with processor.save_pretrained({model_path!r})"
        )
    if model_types and settings.get("model_type") not in model_types:
        raise UserError(
            f"model.model_path: {model_path!r} is a {settings.get('model_type')}; with images this engine was seen to "
            f"compute what the trainer does of {', '.join(model_types)} alone; use engine_type: transformers"
        )


def copy_processor(model_path: str, folder: Path) -> None:
    """Give a model folder what another has beside model and tokenizer; nothing, where that reads no images."""
    source = Path(local_model(model_path))
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


class ImageProcessor:
    """What makes tokens and tensors of images for one model; loads torch with its first image.

    Example: processor = ImageProcessor("Qwen/Qwen2.5-VL-3B-Instruct"); processor.tokens(name); processor.inputs(names)
    """

    def __init__(self, model_path: str, *, trust_remote_code: bool = False, folder: ImageFolder | None = None) -> None:
        self._model_path, self._trust_remote_code = model_path, trust_remote_code
        self.folder = folder or ImageFolder()
        self.run: Storage | None = None
        """The run folder, which is to have what is kept; None: there is none."""
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        """Held by who asks the processor, whose tokenizer is of one thread at a time."""

    @cached_property
    def own(self) -> Any:
        """The processor of transformers that comes with the model."""
        source, options = local_model(self._model_path), {"trust_remote_code": self._trust_remote_code}
        try:
            try:
                # Late, as it loads torch.
                from transformers import AutoProcessor

                processor = AutoProcessor.from_pretrained(source, **options)
            except ImportError as error:
                if "Torchvision" not in str(error):
                    raise
                processor = _without_videos(source, options)
        except (OSError, ValueError, ImportError) as error:
            raise DataError(f"model {self._model_path} gives no processor of images: {error}") from error
        if not hasattr(processor, "image_processor") or not getattr(processor, "image_token", None):
            raise DataError(f"model {self._model_path} reads no images; leave image_key out, or give a model that does")
        return processor

    @property
    def placeholder(self) -> str:
        """The text that a chat template writes for an image, a special token."""
        return str(self.own.image_token)

    @property
    def placeholder_id(self) -> int:
        """Its number."""
        return int(self.own.image_token_id)

    def keep(self, names: Sequence[str]) -> None:
        """Have images in the run folder, before anything that names them, and as tokens in this process."""
        for name in dict.fromkeys(names):
            if self.run is not None and name not in self._kept:
                if not self.run.exists(path := f"{FOLDER}/{name}"):
                    self.run.put_new(path, self.folder.read(name))
                self._kept.add(name)
            self.tokens(name)

    def named(self, told: str) -> str:
        """The name of an image that a request tells by its name, as tasks do, or as a data URL, whose file is put here.

        Raises: DataError: it is an address, is no image, or is not here.
        """
        if told.startswith("data:"):
            [content] = image_files(told, "")
            return self.folder.put(content)
        if not re.fullmatch("[0-9a-f]{64}", told):  # never a path: who asks may read no other files
            raise DataError(f"an image is a data URL, data:image/png;base64,...; nothing is fetched: {told:.60}")
        if not self.folder.holds(told):
            raise DataError(f"no image of this run is called {told}")
        return told

    def tokens(self, name: str) -> tuple[int, ...]:
        """Tokens that stand for the image in a prompt."""
        return _tokens(self, name)

    def with_placeholders(self, tokens: Sequence[int], names: Sequence[str]) -> list[int]:
        """A prompt with one placeholder in place of the tokens of each of its images, as before a processor reads it.

        Raises: DataError: the tokens of an image are not in it, in their order.
        """
        short, begin = list[int](), 0
        for name in names:
            of_image = self.tokens(name)
            ends = range(begin + len(of_image), len(tokens) + 1)
            end = next((end for end in ends if tuple(tokens[end - len(of_image) : end]) == of_image), None)
            if end is None:
                raise DataError(f"a prompt of {len(tokens)} tokens does not hold those of its image {name}")
            short += [*tokens[begin : end - len(of_image)], self.placeholder_id]
            begin = end
        return short + list(tokens[begin:])

    def picture(self, name: str) -> Image:
        """An image, decoded. Raises: DamagedError: its file is another."""
        return _decoded(self.folder.read(name))

    def inputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What the model is given beside the tokens of a sequence with these images, in their order, but for the kinds
        of its tokens: `pixel_values` and the like.
        """
        return dict(_inputs(self, tuple(names)))

    def _made(self, names: Sequence[str]) -> Any:
        import torch  # late: as above

        images = [self.picture(name) for name in names]
        # Kept for other calls than this one, which may have gradients.
        with self._lock, torch.inference_mode(False):
            return self.own(
                text=[self.placeholder * len(images)], images=images, return_tensors="pt", add_special_tokens=False
            )


def _without_videos(source: str, options: dict[str, Any]) -> Any:
    """A processor whose part for videos needs torchvision, which is not there, and which nobody asks here."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer  # late: as above
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(source, **options))]
    said, _ = kind.get_processor_dict(source)
    settings = {name: value for name, value in said.items() if name in inspect.signature(kind.__init__).parameters}
    parts: dict[str, Any] = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    settings |= {name: part.from_pretrained(source, **options) for name, part in parts.items()}
    # It would not be made without that part.
    still = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return still(**{**settings, "video_processor": None})


@lru_cache(maxsize=4096)
def _tokens(processor: ImageProcessor, name: str) -> tuple[int, ...]:
    return tuple(processor._made([name])["input_ids"][0].tolist())


@lru_cache(maxsize=64)
def _inputs(processor: ImageProcessor, names: tuple[str, ...]) -> dict[str, Tensor]:
    # Rows of a group have the same, and a step passes over each several times.
    return {name: value for name, value in processor._made(names).items() if name not in _NO_INPUTS}
