"""A local run in a process of its own: `python -m tests.flows.toy_run STORE TEXT`.

Prints the URL of the server, then the id of the flow run and the digest of the result.
"""

import sys

from artifacts import Store
from flows.local_server import local_prefect
from tests.flows.toy_steps import toy_dag


def main(folder: str, text: str) -> None:
    """Run the toy DAG as a flow, with a server that comes and goes."""
    with local_prefect() as url:
        print(url, flush=True)
        from prefect import flow
        from prefect.runtime import flow_run

        from tasks.prefect_runner import PrefectRunner

        @flow(name="toy", persist_result=False)
        def toy() -> str:
            print(flow_run.id, flush=True)
            with PrefectRunner(Store.open(folder), "toy"):
                return toy_dag(text)["text"].digest

        print(toy(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
