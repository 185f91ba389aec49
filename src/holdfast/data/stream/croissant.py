"""A dataset described in Croissant 1.0, the format of metadata of MLCommons.

Its files are listed with their sha256, which is computed, because a manifest has other checksums.
Tokens are numbers without columns, so only the list of left-out documents has fields. The stages
are in the text that the extension for responsible use has for preprocessing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from holdfast.data.read.files import READ_BYTES
from holdfast.data.stream.dataset import MANIFEST, REMOVED, Dataset

_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{
        name: f"cr:{name}"
        for name in (
            *("citeAs", "column", "equivalentProperty", "extract", "field", "fileProperty"),
            *("fileObject", "fileSet", "format", "includes", "isLiveDataset", "jsonPath", "key"),
            *("md5", "parentField", "path", "recordSet", "references", "regex", "repeated"),
            *("replace", "samplingRate", "separator", "source", "subField", "transform"),
        )
    },
}
_FORMATS = {".json": "application/json", ".jsonl": "application/jsonlines"}
_REMOVED_FIELDS = {
    "document": ("sc:Text", "xxh3-128 of the document as its source has it"),
    "source": ("sc:Text", "name of the source"),
    "kind": ("sc:Text", "kind of the stage, or duplicate"),
}


def describe_croissant(dataset: Dataset, name: str, licence: str, url: str) -> dict[str, Any]:
    """Return the description of a dataset, JSON-safe. licence, url: "" if they are not known. All
    files of the dataset are read."""
    manifest = dataset.manifest
    has_list = dataset.cache is None and (dataset.folder / REMOVED).exists()
    files = {place: dataset.folder / place for place in (MANIFEST, "tokenizer.json")}
    files |= {file.path: dataset.path(file) for file in dataset.files()}
    if has_list:
        files[REMOVED] = dataset.folder / REMOVED
    counts = {split: dataset.counts(split) for split in dataset.splits}
    sizes = ", ".join(f"{s}: {c['documents']:,} documents" for s, c in counts.items())
    stages = manifest["settings"].get("stages", [])
    found: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": name,
        "description": (
            f"Tokens of {', '.join(dataset.source_names)}, prepared by Holdfast ({sizes}). "
            f"Version {dataset.version}."
        ),
        "version": dataset.version,
        **({"license": licence} if licence else {}),
        **({"url": url} if url else {}),
        "rai:dataCollection": json.dumps(manifest["sources"], sort_keys=True),
        "rai:dataPreprocessingProtocol": [json.dumps(s, sort_keys=True) for s in stages],
        "distribution": [_file_object(place, path) for place, path in files.items()],
    }
    if has_list:
        found["recordSet"] = [_removed_records()]
    return found


def _file_object(place: str, path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(READ_BYTES):
            digest.update(piece)
    return {
        "@type": "cr:FileObject",
        "@id": place,
        "name": place,
        "contentUrl": place,
        "contentSize": f"{path.stat().st_size} B",
        "encodingFormat": _FORMATS.get(path.suffix, "application/octet-stream"),
        "sha256": digest.hexdigest(),
    }


def _removed_records() -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "removed",
        "name": "removed",
        "description": "documents that data.stages left out",
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"removed/{name}",
                "name": f"removed/{name}",
                "description": what,
                "dataType": kind,
                "source": {"fileObject": {"@id": REMOVED}, "extract": {"column": name}},
            }
            for name, (kind, what) in _REMOVED_FIELDS.items()
        ],
    }
