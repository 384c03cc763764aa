"""Images and videos of tasks: files by the hash of their content, from a dataset's cell to a model's input.

A task's images are parts of its chat, `{"type": "image", "image": NAME}`; their files are in `media/` of the run folder
from before the first experience that names them, and in a folder of each machine that uses them. A name is the SHA-256
of the file, so a file that is there is the right one, and nobody writes it twice. A video is an image that moves, a
file of several frames, in a part `{"type": "video", "video": NAME}`; elsewhere it is `video:NAME` among the images.

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
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rftdask.data.hub import local_model
from rftdask.errors import DamagedError, DataError, NotFoundError, UserError
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
MAX_INPUT_BYTES = 1 << 30
"""Of inputs of models that a process keeps for the next pass over the same images, some 50 of an image of a megapixel.
What was asked for last is kept, also where it alone is larger."""
_VIDEO = "video:"
"""Before the name of a video's file, so that it is none of an image."""
VIDEO_MODELS = ("qwen2_vl", "qwen2_5_vl")
"""Types of models (`model_type`) whose processors write a video as one run of tokens, which was tried of these."""
_FRAMES_PER_SECOND = 2.0
"""Of a video that tells no time, as a list of frames: what Qwen's own tools assume."""
_NEEDS_TORCHVISION = (
    "format.video_key: transformers prepares videos with torchvision, which is not installed; install the build of the "
    "installed torch, or give frames as images, by format.image_key"
)
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


def video_files(cell: Any, base: str) -> list[bytes]:
    """The files of the videos in a dataset's cell: one, or a list of them.

    A video is a list of frames, each an image as above, or an image that moves (GIF, APNG, WebP). A list of such
    images, or of lists, is several videos. Frames become one file that loses nothing. Raises: DataError: as above, or
    frames differ in size, or the file is of another kind, such as MP4.
    """
    if cell is None:
        return []
    if not isinstance(cell, list | tuple | np.ndarray):
        cell = [cell]
    if any(isinstance(each, list | tuple | np.ndarray) for each in cell):
        return [file for each in cell for file in video_files(each, base)]
    try:
        files = image_files(list(cell), base)
    except DataError as error:
        raise DataError(
            f"{error}; a video is a list of frames, or a GIF, APNG or WebP: of others extract the frames, as by "
            "`ffmpeg -i video.mp4 -vf fps=2 frame%04d.png`"
        ) from error
    frames = [_frames(file) for file in files]
    if all(len(pictures) > 1 for pictures, _ in frames):
        return files
    stills = [pictures[0] for pictures, _ in frames]
    if any(len(pictures) > 1 for pictures, _ in frames):
        raise DataError("some images of a video move, and some do not: give a list of frames, or one image that moves")
    if len({still.size for still in stills}) > 1:
        raise DataError(f"frames of a video differ in size: {', '.join(sorted({str(still.size) for still in stills}))}")
    buffer = io.BytesIO()
    # Without durations, as with one it would join frames that are alike.
    stills[0].save(buffer, format="PNG", save_all=True, append_images=stills[1:])
    return [buffer.getvalue()]


def _frames(content: bytes) -> tuple[list[Image], float]:
    """(Frames, how many of them a second has)."""
    image, frames, durations_ms = _opened(content), [], []
    for number in range(getattr(image, "n_frames", 1)):
        image.seek(number)
        frames.append(image.convert("RGB"))
        durations_ms.append(float(image.info.get("duration") or 0))
    told = sum(durations_ms)
    return frames, 1000 * len(frames) / told if told else _FRAMES_PER_SECOND


def name_of(content: bytes) -> str:
    """Of an image's file."""
    return sha256(content).hexdigest()


def data_url(content: bytes) -> str:
    """An image's file as a page shows it."""
    kind = next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _opened(content: bytes) -> Any:
    """Raises: DataError: it is no image."""
    try:
        from PIL import Image  # late: few runs have images
    except ImportError as error:
        raise UserError("images need Pillow; run `pip install pillow`") from error
    try:
        return Image.open(io.BytesIO(content))
    except (OSError, ValueError) as error:
        raise DataError(f"an image of {len(content)} bytes cannot be read: {error}") from error


def _decoded(content: bytes) -> Image:
    """Raises: DataError: it is no image."""
    try:
        picture: Image = _opened(content).convert("RGB")
    except (OSError, ValueError) as error:
        raise DataError(f"an image of {len(content)} bytes cannot be read: {error}") from error
    return picture


def is_video(name: str) -> bool:
    """Whether this is the name of a video, and not of an image."""
    return name.startswith(_VIDEO)


def file_of(name: str) -> str:
    """Name of the file of an image or a video."""
    return name.removeprefix(_VIDEO)


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Names of the images and videos in a chat, in their order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    shown = [part for part in parts if isinstance(part, Mapping) and part.get("type") in ("image", "video")]
    return tuple(part["image"] if part["type"] == "image" else _VIDEO + part["video"] for part in shown)


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The chat with its texts alone, for what reads no images."""

    def text(content: Any) -> Any:
        if not isinstance(content, list | tuple):
            return content
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") not in ("image", "video"))

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
            path = f"{FOLDER}/{file_of(name)}"
            try:
                content = storage.get(path)
            except NotFoundError as error:
                raise DamagedError(f"{storage.url}/{path}, an image of an experience, is missing") from error
            if self.put(content) != file_of(name):
                raise DamagedError(f"{storage.url}/{path} is not the image whose hash it has for a name")

    def read(self, name: str) -> bytes:
        """The file. Raises: DamagedError: it is another, which then goes: it is made again from where it came."""
        path = self._path / file_of(name)
        content = path.read_bytes()
        if name_of(content) != path.name:
            path.unlink(missing_ok=True)
            raise DamagedError(f"{path} is not the image whose hash it has for a name; start again")
        return content

    def holds(self, name: str) -> bool:
        """Whether the file is here."""
        return (self._path / file_of(name)).exists()


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


def check_reads_videos(model_path: str) -> None:
    """Raises: UserError: the model, if it is on this machine, was not tried with videos, or what prepares them is not
    installed."""
    folder = Path(local_model(model_path))
    if not (folder / "config.json").is_file():
        return
    kind = parse_object((folder / "config.json").read_bytes()).get("model_type")
    if kind not in VIDEO_MODELS:
        raise UserError(
            f"model.model_path: {model_path!r} is a {kind}, and a taskset has format.video_key: videos are read by "
            f"{', '.join(VIDEO_MODELS)} alone; give frames as images, by format.image_key"
        )
    if find_spec("torchvision") is None:
        raise UserError(_NEEDS_TORCHVISION)


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

    def __init__(
        self,
        model_path: str,
        *,
        trust_remote_code: bool = False,
        folder: ImageFolder | None = None,
        max_input_bytes: int = MAX_INPUT_BYTES,
    ) -> None:
        self._model_path, self._trust_remote_code = model_path, trust_remote_code
        self._max_input_bytes = max_input_bytes
        self.folder = folder or ImageFolder()
        self.run: Storage | None = None
        """The run folder, which is to have what is kept; None: there is none."""
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        """Held by who asks the processor, whose tokenizer is of one thread at a time."""
        self._inputs: OrderedDict[tuple[str, ...], dict[str, Tensor]] = OrderedDict()
        """Those of sequences asked for last, the newest at the end."""
        self._inputs_lock = threading.Lock()

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
    def placeholders(self) -> dict[int, str]:
        """Number -> text of the special tokens that a chat template writes for an image, and for a video."""
        placeholders = {self.placeholder_id: str(self.own.image_token)}
        if getattr(self.own, "video_token", None) and getattr(self.own, "video_token_id", None) is not None:
            placeholders[int(self.own.video_token_id)] = str(self.own.video_token)
        return placeholders

    @property
    def placeholder_id(self) -> int:
        """The number of the one that stands for an image."""
        return int(self.own.image_token_id)

    def placeholder_of(self, name: str) -> int:
        """The number of the one that stands for this image or video."""
        return int(self.own.video_token_id) if is_video(name) else self.placeholder_id

    def kinds(self, tokens: Tensor, names: Sequence[str]) -> Tensor:
        """int32 like `tokens`: 1 where one is of an image, 2 of a video, else 0, of a row with these images."""
        kinds = (tokens == self.placeholder_id).int()
        if any(is_video(name) for name in names):  # else that token, where there is one, stands for nothing
            kinds += 2 * (tokens == self.placeholder_of(_VIDEO)).int()
        return kinds

    def keep(self, names: Sequence[str]) -> None:
        """Have images in the run folder, before anything that names them, and as tokens in this process."""
        for name in dict.fromkeys(names):
            if self.run is not None and name not in self._kept:
                if not self.run.exists(path := f"{FOLDER}/{file_of(name)}"):
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
            short += [*tokens[begin : end - len(of_image)], self.placeholder_of(name)]
            begin = end
        return short + list(tokens[begin:])

    def picture(self, name: str) -> Image:
        """An image, decoded. Raises: DamagedError: its file is another."""
        return _decoded(self.folder.read(name))

    def inputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """What the model is given beside the tokens of a sequence with these images, in their order, but for the kinds
        of its tokens: `pixel_values`, of videos `pixel_values_videos`, and the like.
        """
        # Kept: rows of a group have the same, and a step passes over each several times.
        key = tuple(names)
        with self._inputs_lock:
            if key in self._inputs:
                self._inputs.move_to_end(key)
                return dict(self._inputs[key])
        made = {name: value for name, value in self._made(names).items() if name not in _NO_INPUTS}
        inputs = {name: value for name, value in made.items() if hasattr(value, "shape")}
        with self._inputs_lock:
            self._inputs[key] = inputs
            while len(self._inputs) > 1 and sum(map(_num_bytes, self._inputs.values())) > self._max_input_bytes:
                self._inputs.popitem(last=False)
        return dict(inputs)

    def _made(self, names: Sequence[str]) -> Any:
        import torch  # late: as above

        images = [self.picture(name) for name in names if not is_video(name)]
        videos = [_frames(self.folder.read(name)) for name in names if is_video(name)]
        given: dict[str, Any] = {"images": images or None}
        if videos:
            if self.own.video_processor is None:
                raise UserError(_NEEDS_TORCHVISION)
            given["videos"] = [np.stack([np.asarray(frame) for frame in frames]) for frames, _ in videos]
            given["video_metadata"] = [
                {"total_num_frames": len(frames), "fps": fps, "frames_indices": list(range(len(frames)))}
                for frames, fps in videos
            ]
        text = "".join(self.placeholders[self.placeholder_of(name)] for name in names)
        # Kept for other calls than this one, which may have gradients.
        with self._lock, torch.inference_mode(False):
            return self.own(text=[text], **given, return_tensors="pt", add_special_tokens=False)


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


def _num_bytes(inputs: Mapping[str, Tensor]) -> int:
    return sum(value.nbytes for value in inputs.values())
