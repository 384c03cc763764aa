"""Images and videos of tasks: files named by the hash of their content, from a dataset's cell to a model's input.

The images of a task are parts of its chat, `{"type": "image", "image": NAME}`. Their files are in `media/` of the run
folder before the first experience names them, and in a folder of each machine that uses them. A name is the SHA-256 of
the file, so an existing file never needs to be written again. A video is an animated image, a file of several frames,
in a part `{"type": "video", "video": NAME}`; elsewhere its name is `video:NAME` among the images.

In a token sequence, an image is the run of tokens that the model's processor writes in place of the placeholder of the
chat template. The policy must not sample that placeholder, which would stand for an image that does not exist.
"""

from __future__ import annotations

import base64
import binascii
import inspect
import io
import os
import re
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
from rftdask.storage.shared_folder import private_folder

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

FOLDER = "media"
"""Folder of image files in the run folder."""
_NO_INPUTS = {"input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"}
"""Outputs of a processor that are not used."""
_MAGIC = {
    b"\x89PNG": "image/png",
    b"\xff\xd8": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
    b"BM": "image/bmp",
}
"""First bytes of image files that browsers can show -> MIME type."""
MAX_INPUT_BYTES = 1 << 30
"""Size limit of the model inputs that a process caches for the next pass over the same images, about 50 images of a
megapixel. The most recent inputs are kept even if they exceed it."""
_VIDEO = "video:"
"""Prefix of the name of a video, to distinguish it from an image."""
VIDEO_MODELS = ("qwen2_vl", "qwen2_5_vl")
"""Types of models (`model_type`) whose videos were tested: their processors write a video as one run of tokens."""
_FRAMES_PER_SECOND = 2.0
"""Default for videos without durations, such as lists of frames; the same as in Qwen's own tools."""
_NEEDS_TORCHVISION = (
    "format.video_key: transformers prepares videos with torchvision, which is not installed; install the build for "
    "the installed torch, or pass frames as images, by format.image_key"
)
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of a model folder for its processor of images and videos."""


def image_files(cell: Any, base: str) -> list[bytes]:
    """Return the files of the images in a dataset's cell: one image, or a list of them.

    An image is bytes, {"bytes": ..., "path": ...} as in `datasets`, an image of PIL, a data URL, or the path of a file,
    relative to `base`. Raises: DataError: anything else, or the file does not exist.
    """
    if cell is None:
        return []
    if isinstance(cell, list | tuple):
        return [file for item in cell for file in image_files(item, base)]
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
        raise DataError(f"an image is a URL, {cell:.100}; images must be files: download it and use its path")
    elif isinstance(cell, str):
        path = Path(base, cell).expanduser()
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"image {path} cannot be read: {error.strerror}") from error
    elif hasattr(cell, "save"):
        buffer = io.BytesIO()
        cell.save(buffer, format="PNG")  # lossless, and supports every mode of PIL
        content = buffer.getvalue()
    else:
        raise DataError(f"an image is a {type(cell).__name__}; use a file path, bytes, or an image of PIL")
    _frames(content, only_first=True)
    return [content]


def video_files(cell: Any, base: str) -> list[bytes]:
    """Return the files of the videos in a dataset's cell: one video, or a list of them.

    A video is a list of frames, each an image as in `image_files`, or an animated image (GIF, APNG, WebP). A list of
    animated images, or of lists, is several videos. Frames become one lossless file. Raises: DataError: as
    `image_files`, or frames differ in size, or another kind of file, such as MP4.
    """
    if cell is None:
        return []
    if not isinstance(cell, list | tuple | np.ndarray):
        cell = [cell]
    if any(isinstance(item, list | tuple | np.ndarray) for item in cell):
        return [file for item in cell for file in video_files(item, base)]
    try:
        files = image_files(list(cell), base)
    except DataError as error:
        raise DataError(
            f"{error}; a video is a list of frames, or a GIF, APNG or WebP: extract the frames of other files, for "
            "example with `ffmpeg -i video.mp4 -vf fps=2 frame%04d.png`"
        ) from error
    frames = [_frames(file)[0] for file in files]
    if all(len(pictures) > 1 for pictures in frames):
        return files
    if any(len(pictures) > 1 for pictures in frames):
        raise DataError("some images of a video are animated, and some are not: use frames, or one animated image")
    stills = [pictures[0] for pictures in frames]
    if len({still.size for still in stills}) > 1:
        raise DataError(f"frames of a video differ in size: {', '.join(sorted({str(still.size) for still in stills}))}")
    buffer = io.BytesIO()
    # Without durations: with durations PIL would merge equal frames.
    stills[0].save(buffer, format="PNG", save_all=True, append_images=stills[1:])
    return [buffer.getvalue()]


def name_of(content: bytes) -> str:
    return sha256(content).hexdigest()


def data_url(content: bytes) -> str:
    kind = next((kind for magic, kind in _MAGIC.items() if content.startswith(magic)), "application/octet-stream")
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _frames(content: bytes, only_first: bool = False) -> tuple[list[Image], float]:
    """Decode an image. Returns: (frames, frames per second). Raises: DataError: it cannot be read."""
    try:
        from PIL import Image  # late: few runs have images
    except ImportError as error:
        raise UserError("images need Pillow; run `pip install pillow`") from error
    frames, duration_ms = [], 0.0
    try:
        image = Image.open(io.BytesIO(content))
        for number in range(1 if only_first else getattr(image, "n_frames", 1)):
            image.seek(number)
            frames.append(image.convert("RGB"))
            duration_ms += float(image.info.get("duration") or 0)
    except (OSError, ValueError) as error:
        raise DataError(f"an image of {len(content)} bytes cannot be read: {error}") from error
    return frames, 1000 * len(frames) / duration_ms if duration_ms else _FRAMES_PER_SECOND


def is_video(name: str) -> bool:
    """Return True for the name of a video, False for that of an image."""
    return name.startswith(_VIDEO)


def file_of(name: str) -> str:
    """Return the file name of an image or a video."""
    return name.removeprefix(_VIDEO)


def images_in(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the images and videos in a chat, in order."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list | tuple) for part in content]
    media = [part for part in parts if isinstance(part, Mapping) and part.get("type") in ("image", "video")]
    return tuple(part["image"] if part["type"] == "image" else _VIDEO + part["video"] for part in media)


def without_images(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return the chat with only its texts."""

    def text(content: Any) -> Any:
        if not isinstance(content, list | tuple):
            return content
        return "\n".join(str(part.get("text", "")) for part in content if part.get("type") not in ("image", "video"))

    return tuple({**message, "content": text(message.get("content"))} for message in messages)


class ImageFolder:
    """Image files on this machine by name, shared by the processes of this user."""

    def __init__(self, path: Path | None = None) -> None:
        """path: None uses a folder of this user that is kept between runs."""
        default = Path(tempfile.gettempdir(), f"rftdask-media-{os.getuid()}")
        self._path = private_folder(path or default, "set TMPDIR to your own folder")

    def put(self, content: bytes) -> str:
        """Store an image file and return its name."""
        name = name_of(content)
        if not self.holds(name):
            with tempfile.NamedTemporaryFile(dir=self._path, delete=False) as file:
                file.write(content)
            os.replace(file.name, self._path / name)
        return name

    def fetch(self, storage: Storage, names: Sequence[str]) -> None:
        """Copy the image files of a run to this machine. Raises: DamagedError: one is missing or has other content."""
        for name in dict.fromkeys(names):
            if self.holds(name):
                continue
            path = f"{FOLDER}/{file_of(name)}"
            try:
                content = storage.get(path)
            except NotFoundError as error:
                raise DamagedError(f"{storage.url}/{path}, an image of an experience, is missing") from error
            if self.put(content) != file_of(name):
                raise DamagedError(
                    f"{storage.url}/{path} does not match the hash in its name; restore it from a backup"
                )

    def read(self, name: str) -> bytes:
        """Return the content of a file. Raises: DamagedError: it does not match the hash in its name; it is deleted."""
        path = self._path / file_of(name)
        content = path.read_bytes()
        if name_of(content) != path.name:
            path.unlink(missing_ok=True)
            raise DamagedError(f"{path} does not match the hash in its name; start again")
        return content

    def holds(self, name: str) -> bool:
        return (self._path / file_of(name)).exists()


def _model_settings(model_path: str) -> dict[str, Any] | None:
    """Return config.json of a model; None if the model is not on this machine."""
    file = Path(local_model(model_path), "config.json")
    return parse_object(file.read_bytes()) if file.is_file() else None


def can_be_given_images(model_path: str, model_types: Sequence[str] = ()) -> bool:
    """Return True if the model is on this machine and passes `check_reads_images`."""
    try:
        check_reads_images(model_path, model_types)
    except UserError:
        return False
    return _model_settings(model_path) is not None


def check_reads_images(model_path: str, model_types: Sequence[str] = ()) -> None:
    """Check that a model, if it is on this machine, can be used with images.

    Args: model_types: types whose images the engine reads; (): any.
    Raises: UserError: the model reads no images, its processor is missing, or the engine does not read its images.
    """
    if (settings := _model_settings(model_path)) is None:
        return
    if "vision_config" not in settings:
        raise UserError(
            f"model.model_path: {model_path!r} reads no images, and a taskset has format.image_key; use a model that "
            "does, or leave the key out"
        )
    if not any(Path(local_model(model_path), name).is_file() for name in PROCESSOR_FILES):
        raise UserError(
            f"model.model_path: {model_path!r} has no {' or '.join(PROCESSOR_FILES[:2])}, which defines its image "
            f"inputs; save one there with processor.save_pretrained({model_path!r})"
        )
    if model_types and settings.get("model_type") not in model_types:
        raise UserError(
            f"model.model_path: {model_path!r} is a {settings.get('model_type')}; with images this engine was verified "
            f"to compute the same as the trainer only for {', '.join(model_types)}; use engine_type: transformers"
        )


def check_reads_videos(model_path: str) -> None:
    """Check that a model, if it is on this machine, can be used with videos.

    Raises: UserError: the model was not tested with videos, or torchvision is not installed.
    """
    if (settings := _model_settings(model_path)) is None:
        return
    kind = settings.get("model_type")
    if kind not in VIDEO_MODELS:
        raise UserError(
            f"model.model_path: {model_path!r} is a {kind}, and a taskset has format.video_key: only "
            f"{', '.join(VIDEO_MODELS)} read videos; pass frames as images, by format.image_key"
        )
    if find_spec("torchvision") is None:
        raise UserError(_NEEDS_TORCHVISION)


class ImageProcessor:
    """Makes tokens and tensors of images for one model; loads torch with its first image.

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
        """Run folder to which `keep` copies images; None: there is none."""
        self._kept: set[str] = set()
        self._lock = threading.Lock()
        """Guards the processor, whose tokenizer is not thread-safe."""
        self._inputs: OrderedDict[tuple[str, ...], dict[str, Tensor]] = OrderedDict()
        """Cached inputs by names of images, the most recently used last."""
        self._inputs_lock = threading.Lock()

    @cached_property
    def hf_processor(self) -> Any:
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
            raise DataError(f"model {self._model_path} has no usable image processor: {error}") from error
        if not hasattr(processor, "image_processor") or not getattr(processor, "image_token", None):
            raise DataError(f"model {self._model_path} reads no images; leave image_key out, or use a model that does")
        return processor

    @property
    def placeholders(self) -> dict[int, str]:
        """Id -> text of the special tokens that a chat template writes for an image, and for a video."""
        processor = self.hf_processor
        placeholders = {self.placeholder_id: str(processor.image_token)}
        if getattr(processor, "video_token", None) and getattr(processor, "video_token_id", None) is not None:
            placeholders[int(processor.video_token_id)] = str(processor.video_token)
        return placeholders

    @property
    def placeholder_id(self) -> int:
        return int(self.hf_processor.image_token_id)

    def placeholder_of(self, name: str) -> int:
        """Return the id of the placeholder of this image or video."""
        return int(self.hf_processor.video_token_id) if is_video(name) else self.placeholder_id

    def kinds(self, tokens: Tensor, names: Sequence[str]) -> Tensor:
        """Return the kind of each token of a row with these images, int32 like `tokens`: 1 image, 2 video, 0 other."""
        kinds = (tokens == self.placeholder_id).int()
        if any(is_video(name) for name in names):  # otherwise the video token, if it exists, has no meaning
            kinds += 2 * (tokens == self.placeholder_of(_VIDEO)).int()
        return kinds

    def keep(self, names: Sequence[str]) -> None:
        """Copy images to the run folder, before anything names them, and compute their tokens."""
        for name in dict.fromkeys(names):
            if self.run is not None and name not in self._kept:
                if not self.run.exists(path := f"{FOLDER}/{file_of(name)}"):
                    self.run.put_new(path, self.folder.read(name))
                self._kept.add(name)
            self.tokens(name)

    def named(self, image: str) -> str:
        """Return the name of an image of a request: a name, as in tasks, or a data URL, whose file is stored.

        Raises: DataError: it is another URL, not an image, or unknown.
        """
        if image.startswith("data:"):
            [content] = image_files(image, "")
            return self.folder.put(content)
        if not re.fullmatch("[0-9a-f]{64}", image):  # never a path: clients must not read other files
            raise DataError(f"an image must be a data URL, data:image/png;base64,...; nothing is fetched: {image:.60}")
        if not self.folder.holds(image):
            raise DataError(f"no image of this run is called {image}")
        return image

    def tokens(self, name: str) -> tuple[int, ...]:
        return _tokens(self, name)

    def with_placeholders(self, tokens: Sequence[int], names: Sequence[str]) -> list[int]:
        """Return a prompt with one placeholder in place of the tokens of each image, as input of a processor.

        Raises: DataError: it does not contain the tokens of the images, in their order.
        """
        short, begin = list[int](), 0
        for name in names:
            of_image = self.tokens(name)
            ends = range(begin + len(of_image), len(tokens) + 1)
            end = next((end for end in ends if tuple(tokens[end - len(of_image) : end]) == of_image), None)
            if end is None:
                raise DataError(f"a prompt of {len(tokens)} tokens does not contain those of its image {name}")
            short += [*tokens[begin : end - len(of_image)], self.placeholder_of(name)]
            begin = end
        return short + list(tokens[begin:])

    def picture(self, name: str) -> Image:
        """Return an image, decoded. Raises: DamagedError: its file has other content."""
        return _frames(self.folder.read(name), only_first=True)[0][0]

    def inputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return the model inputs, in addition to tokens and their kinds, for a sequence with these images in order.

        These are `pixel_values`, for videos `pixel_values_videos`, and the like.
        """
        # Cached: the rows of a group have the same images, and a step passes over each several times.
        key = tuple(names)
        with self._inputs_lock:
            if key in self._inputs:
                self._inputs.move_to_end(key)
                return dict(self._inputs[key])
        outputs = self._process(names).items()
        inputs = {name: value for name, value in outputs if name not in _NO_INPUTS and hasattr(value, "shape")}
        with self._inputs_lock:
            self._inputs[key] = inputs
            sizes = [sum(value.nbytes for value in cached.values()) for cached in self._inputs.values()]
            while len(sizes) > 1 and sum(sizes) > self._max_input_bytes:
                self._inputs.popitem(last=False)
                del sizes[0]
        return dict(inputs)

    def _process(self, names: Sequence[str]) -> Any:
        import torch  # late: as above

        images = [self.picture(name) for name in names if not is_video(name)]
        videos = [_frames(self.folder.read(name)) for name in names if is_video(name)]
        arguments: dict[str, Any] = {"images": images or None}
        if videos:
            if self.hf_processor.video_processor is None:
                raise UserError(_NEEDS_TORCHVISION)
            arguments["videos"] = [np.stack([np.asarray(frame) for frame in frames]) for frames, _ in videos]
            arguments["video_metadata"] = [
                {"total_num_frames": len(frames), "fps": fps, "frames_indices": list(range(len(frames)))}
                for frames, fps in videos
            ]
        text = "".join(self.placeholders[self.placeholder_of(name)] for name in names)
        # Not inference tensors: the results are cached, and later calls may need gradients.
        with self._lock, torch.inference_mode(False):
            return self.hf_processor(text=[text], **arguments, return_tensors="pt", add_special_tokens=False)


def _without_videos(source: str, options: dict[str, Any]) -> Any:
    """Load a processor without its video part, which would need torchvision."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer  # late: as above
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind: Any = PROCESSOR_MAPPING[type(AutoConfig.from_pretrained(source, **options))]
    saved, _ = kind.get_processor_dict(source)
    settings = {name: value for name, value in saved.items() if name in inspect.signature(kind.__init__).parameters}
    parts: dict[str, Any] = {"image_processor": AutoImageProcessor, "tokenizer": AutoTokenizer}
    settings |= {name: part.from_pretrained(source, **options) for name, part in parts.items()}
    # The check would refuse None as video processor.
    without_check = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    return without_check(**{**settings, "video_processor": None})


@lru_cache(maxsize=4096)
def _tokens(processor: ImageProcessor, name: str) -> tuple[int, ...]:
    return tuple(processor._process([name])["input_ids"][0].tolist())
