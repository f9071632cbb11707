"""A server of remote rollouts as its users write it, with what the package gives them; nothing here knows of Bloomery. What it does follows from the
row's id, so that tests can have it go wrong.

`python -m tests.eval_protocol.server PORT`; records of status go to FW_TRACING_GATEWAY_BASE_URL.
"""

import logging
import sys
import threading
from typing import Any

import httpx
import uvicorn
from eval_protocol import FireworksTracingHttpHandler, InitRequest, RolloutIdFilter, Status
from fastapi import FastAPI, HTTPException
from openai import OpenAI

app = FastAPI()
handler = FireworksTracingHttpHandler()


@app.post("/init")
def init(request: InitRequest) -> dict[str, str]:
    if request.metadata.row_id.startswith("refused"):
        raise HTTPException(422, "this row is not for me")
    threading.Thread(target=rollout, args=(request,), daemon=True).start()
    return {"status": "accepted"}


def rollout(request: InitRequest) -> None:
    row = request.metadata.row_id
    logger = logging.getLogger(f"rollout.{request.metadata.rollout_id}")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.addFilter(RolloutIdFilter("someone-else" if row.startswith("mistaken") else request.metadata.rollout_id))
    logger.info("begun", extra={"status": Status.rollout_running()})
    try:
        answers = converse(request)
        if row.startswith("breaks"):
            raise ValueError("the tool broke")
    except Exception as error:
        logger.error("broken", extra={"status": Status.rollout_internal_error(str(error))})
        return
    report(request)
    if row.startswith("silent"):
        return
    logger.info("done", extra={"status": Status.rollout_finished(), "extras": {"answers": answers}})


def converse(request: InitRequest) -> int:
    """Two turns; with a key of the server's own, as one that was made for another service has."""
    if request.metadata.row_id.startswith("mute"):
        return 0
    messages: list[Any] = [message.dump_mdoel_for_chat_completion_request() for message in request.messages or []]
    with OpenAI(base_url=request.model_base_url, api_key="a key of my own") as model:
        for _ in range(2):
            completion = model.chat.completions.create(**request.completion_params, messages=messages)
            said = completion.choices[0].message
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": "And again?"}]
    return 2


REPORTS: dict[str, Any] = {"reports": 0.5, "reports-nan": float("nan"), "reports-foreign": 0.5}


def report(request: InitRequest) -> None:
    kind = request.metadata.row_id.partition(".")[0]
    if kind in REPORTS:
        whose = "99.0" if kind == "reports-foreign" else request.metadata.rollout_id
        text = f'{{"reward": {str(REPORTS[kind]).replace("nan", "NaN")}, "rollout_id": "{whose}"}}'
        httpx.post(f"{request.model_base_url}/reward", content=text, headers={"content-type": "application/json"}).raise_for_status()


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
