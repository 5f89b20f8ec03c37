"""A model for Triton's python backend that answers one letter at a time, as tests/doubles/engine_stand_ins.py
does.
"""

import os
import sys
import threading

sys.path.insert(0, os.environ["TRITON_SITE_PACKAGES"])  # Triton's own interpreter looks nowhere else.

import numpy as np
import triton_python_backend_utils as pb_utils


def letter(seed, i):
    return chr(97 + (seed * 5 + i * i + 3 * i) % 26)


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            threading.Thread(
                target=self.answer, args=(request, request.get_response_sender()), daemon=True
            ).start()

    def answer(self, request, sender):
        def given(name, otherwise):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return otherwise if tensor is None else int(tensor.as_numpy().reshape(-1)[0])

        seed = given("seed", 0)
        for i in range(given("max_tokens", 16)):
            if request.is_cancelled():
                break
            output = pb_utils.Tensor("text_output", np.array([letter(seed, i).encode()], dtype=object))
            sender.send(pb_utils.InferenceResponse([output]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
