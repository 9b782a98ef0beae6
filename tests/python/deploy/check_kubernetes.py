"""Checks documents with the schemas of Kubernetes: `python check_kubernetes.py FOLDER VERSION < documents.json`.

Reads a JSON array of documents, and prints a JSON array with an error or "" for each. FOLDER has the package
`kubernetes_validate`. A field that a schema does not have is an error.
"""

import json
import sys

sys.path.insert(0, sys.argv[1])

import kubernetes_validate  # noqa: E402


def check(document: dict) -> str:
    """Returns the error of a document; empty if it is valid."""
    try:
        kubernetes_validate.validate(document, sys.argv[2], strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{'.'.join(map(str, error.path))}: {error.message}"
    except (kubernetes_validate.SchemaNotFoundError, kubernetes_validate.VersionNotSupportedError) as error:
        return error.message
    return ""


print(json.dumps([check(document) for document in json.load(sys.stdin)]))
