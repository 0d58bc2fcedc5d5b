"""The endpoints of `/`, `/links`, `/docs` and `/timeline`, which are HTML pages.

None of them needs a key, for none holds data of a client: what a page shows it fetches from this server's own routes,
with the key that its reader types.
"""

from __future__ import annotations

from html import escape
from http import HTTPStatus

from slotwise.api.admin.admin import capabilities
from slotwise.api.admin.html import link_page, reference_page, shell
from slotwise.api.admin.html.link_page import COMPLETES, Example, Link
from slotwise.api.chat_page import page_builder as chat_page
from slotwise.api.generate.context import ServedEngine, ServerClients, TextService
from slotwise.api.http.http_exchange import HttpExchange, about
from slotwise.api.limits.server_settings import ServerSettings
from slotwise.observe.timeline import page_builder as timeline_page


@about(media_type="text/html")
async def index(clients: ServerClients, engine: ServedEngine, text: TextService, settings: ServerSettings,
                exchange: HttpExchange) -> None:
    """The chat page; the page of `/links` with `--no-ui`, or for a model that does not generate."""
    if settings.ui and not engine.client.info.generation_objection:
        await respond_chat(exchange, settings.root_path)
    else:
        await links(clients, engine, text, settings, exchange)


async def respond_chat(exchange: HttpExchange, root_path: str, *, is_router: bool = False) -> None:
    """Send the chat page, or 304 to a browser that has it."""
    tag = chat_page.tag(root_path, is_router=is_router)
    headers = [(b"etag", tag), (b"cache-control", b"no-cache"), (b"referrer-policy", b"no-referrer"),
               (b"content-security-policy", chat_page.policy())]
    if tag in dict(exchange.scope["headers"]).get(b"if-none-match", b""):
        await exchange.respond(b"", HTTPStatus.NOT_MODIFIED, shell.HTML, headers)
        return
    document = chat_page.document(root_path, is_router=is_router)
    await exchange.respond(document, content_type=shell.HTML, headers=headers)


@about(media_type="text/html")
async def links(clients: ServerClients, engine: ServedEngine, text: TextService, settings: ServerSettings,
                exchange: HttpExchange) -> None:
    """A page with links to the others, an example, and the model's name where no key is needed."""
    needs_key, root_path = clients.keys.needed, settings.root_path
    names = () if needs_key else engine.models.names
    served = " or ".join(f"<code>{escape(name)}</code>" for name in names)
    told = f"This server has the model {served}." if names else "This server asks for a key."
    able = capabilities(engine, settings, text)
    route = next((route for name, route in link_page.USES if name in able), COMPLETES)
    example = Example(link_page.address_of(exchange, root_path), route, names[0] if names else "", needs_key)
    await respond_links(exchange, told, link_page.LINKS, settings, example)


async def respond_links(exchange: HttpExchange, told: str, there: tuple[Link, ...], settings: ServerSettings,
                        example: Example) -> None:
    """Send the page of links.  Args: told: about the service, as HTML; there: further links."""
    there = ((link_page.CHAT_PAGE,) if settings.ui else ()) + there
    await shell.respond(exchange, link_page.page(told, there, settings.root_path, example))


async def respond_reference(exchange: HttpExchange, page: bytes) -> None:
    """Send a page that `reference_page` made."""
    await shell.respond(exchange, page, reference_page.script())


@about(media_type="text/html")
async def timeline(exchange: HttpExchange) -> None:
    """The live timeline of the batch, step by step, as an HTML page."""
    await respond_timeline(exchange, timeline_page.live())


async def respond_timeline(exchange: HttpExchange, document: bytes) -> None:
    """Send a page of `observe.timeline`."""
    await exchange.respond(document, content_type=shell.HTML, headers=[
        (b"content-security-policy", timeline_page.policy()), (b"cache-control", b"no-cache"),
        (b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer")])
