"""Everything that OpenVINO raises; the classes of its own derive from `Exception` alone."""

import openvino._pyopenvino as openvino_state

from mirrorsd.graphs.errors import errors_of

OPENVINO_ERRORS = errors_of(openvino_state)
