"""The status page of batchers: what is wrong with them, and their figures of the last minutes.

    recorder    an observer of each batcher, which keeps five minutes of events in slots
    page        what is wrong, the data as JSON, the streams and the routes

API process, on its event loop. The page itself is `page.html`, `style.css` and `script.js`.
"""

from fast_batcher.fastapi.status.page import status_router

__all__ = ["status_router"]
