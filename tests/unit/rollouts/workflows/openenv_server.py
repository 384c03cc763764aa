"""A server with the messages of openenv-core 0.3: python openenv_server.py [SESSIONS]

It prints its port. An environment is a digit to guess, given by the seed; at most SESSIONS (2) exist at once. The
server of openenv-core is not used, because its requirements conflict with the versions here.
"""

import asyncio
import json
import socket
import sys
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

MOST = int(sys.argv[1]) if len(sys.argv) > 1 else 2
num_sessions = 0


def error(message: str, code: str, **more: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code, **more}}


def observation(text: str, reward: float | None = None, *, done: bool = False) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": {"text": text, "b": 1}, "reward": reward, "done": done}}


async def play(web: WebSocket) -> None:
    global num_sessions
    await web.accept()
    if num_sessions >= MOST:
        await web.send_json(error("Server at capacity", "CAPACITY_REACHED", active_sessions=num_sessions))
        await web.close()
        return
    num_sessions += 1
    digit = ""
    try:
        while True:
            asked = json.loads(await web.receive_text())
            said = asked["data"].get("message")
            if asked["type"] == "reset":
                digit = str(asked["data"]["seed"] % 10)
                answer = observation(asked["data"].get("greeting", "a digit?"))
            elif not isinstance(said, str):
                errors = [{"loc": ["message"], "msg": "Input should be a valid string"}]
                answer = error("Invalid message", "VALIDATION_ERROR", errors=errors)
            elif said == "boom":
                answer = error("the world ended", "EXECUTION_ERROR")
            elif said == "vanish":
                await web.close()
                return
            elif said == "hang":
                await asyncio.sleep(60)
                return
            elif said == "babble":
                answer = {"type": "observation", "data": "?"}
            else:
                answer = observation("right", 1.0, done=True) if said == digit else observation("wrong", -0.25)
            await web.send_json(answer)
    except WebSocketDisconnect:
        pass
    finally:
        num_sessions -= 1


if __name__ == "__main__":
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    app = Starlette(routes=[WebSocketRoute("/ws", play)])
    uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)).run([listening])
