"""The XLA FFI headers as a repository: unpacked from a jaxlib wheel by ffi/xla_headers.py."""

_BUILD = """
cc_library(
    name = "headers",
    hdrs = glob(["include/xla/ffi/api/*.h"]),
    includes = ["include"],
    visibility = ["//visibility:public"],
)
"""

def _xla_headers_impl(context):
    python = context.os.environ.get("PYTHON") or "python3"
    script = context.path(Label("//:ffi/xla_headers.py"))
    result = context.execute([python, script, context.path("include")])
    if result.return_code != 0:
        fail("the XLA FFI headers cannot be had: " + result.stderr)
    context.file("BUILD.bazel", _BUILD)

xla_headers = repository_rule(
    doc = "Needs a Python with pip (environment variable PYTHON, or python3) and a package index.",
    implementation = _xla_headers_impl,
    environ = ["PYTHON"],
)
