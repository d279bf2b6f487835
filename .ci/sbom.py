"""Write the bill of materials of a release, CycloneDX JSON: .ci/sbom.py FOLDER

It names the package, each file in FOLDER with its SHA-256, and what the wheel asks for. The engine links libc and libm alone and
contains no code of others, so there is nothing else to name. The same files give the same bytes; the schema is checked first.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import sys
import tarfile
import uuid
from email.parser import Parser
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.contact import OrganizationalEntity
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def bill(folder: Path) -> str:
    """Return the text for the sdist and the wheels in `folder`, at the time SOURCE_DATE_EPOCH."""
    files = sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        info = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        metadata = Parser().parsestr(info.read().decode() if info else "")
    package = Component(
        name=metadata["Name"],
        version=metadata["Version"],
        type=ComponentType.LIBRARY,
        bom_ref="package",
        description=metadata["Summary"],
        licenses=[DisjunctiveLicense(id=metadata["License-Expression"])],
        purl=PackageURL("pypi", None, metadata["Name"], metadata["Version"]),
        components=[_file(each) for each in files],
    )
    asked = [each for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, " ".join(_sha256(each) for each in files)),
        metadata=BomMetaData(
            component=package,
            timestamp=datetime.datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), datetime.timezone.utc),
            supplier=OrganizationalEntity(name=metadata["Author"]),
        ),
        components=[_asked(each) for each in asked],
    )
    bom.register_dependency(package, bom.components)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        raise SystemExit(f"the bill of materials is not CycloneDX 1.6: {wrong}")
    return text


def _file(path: Path) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=_sha256(path))]
    return Component(name=path.name, type=ComponentType.FILE, bom_ref=path.name, hashes=hashes)


def _asked(requirement: str) -> Component:
    """Name what pip installs beside the wheel. The user's environment decides its version."""
    name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
    return Component(
        name=name, bom_ref=name, description=f"required: {requirement}", purl=PackageURL("pypi", None, name)
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    to = Path(sys.argv[1])
    (source,) = to.glob("*.tar.gz")
    (to / source.name.replace(".tar.gz", ".cdx.json")).write_text(bill(to), encoding="utf-8")
