"""A host's TPU worker: what `start_grpc_tpu_worker` of the tensorflow-tpu wheel is, told by its environment instead of
by the metadata server.

    python -m training.backends.tensorflow.worker PORT

It serves its devices to the program on host 0 until its standard input ends, which happens when the process that
started it is gone, however that went. It prints `serving` once it listens, or `unusable: ` and why. (The wheel's own
script knows host bounds of v2 and v3 only, stops at a v6e, and reads only the old format of worker-network-endpoints:
tensorflow/python/tools/grpc_tpu_worker.py.)
"""

from __future__ import annotations

import os
import sys

from training.errors import UnusableTpu


def main(port: int) -> None:
    """Serves on `port` until standard input ends."""
    try:
        import tensorflow as tf  # initialises some TPUs
    except ImportError:
        raise
    except Exception as error:
        print(f"unusable: {UnusableTpu(str(error), os.environ.get('TPU_ACCELERATOR_TYPE'))}", flush=True)
        sys.exit(1)
    # Programs are compiled here: products of fp32 keep their factors, which a TPU would round to bf16.
    tf.config.experimental.enable_tensor_float_32_execution(False)
    server = tf.distribute.Server(
        {"tpu_worker": [f"localhost:{port}"]}, job_name="tpu_worker", task_index=0, protocol="grpc", start=True
    )
    print("serving", flush=True)
    sys.stdin.buffer.read()
    del server
    os._exit(0)  # its threads don't end by themselves


if __name__ == "__main__":
    main(int(sys.argv[1]))
