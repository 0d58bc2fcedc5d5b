// The request that the address names, as #request=ID: an X-Request-Id, or the id of a response.
const ROOM = 6; // steps shown on either side of it

// Shows and pins the request as soon as the history has it, and again when the address names another one.
export function attachFocus(page) {
  const read = () => {
    page.wanted = new URLSearchParams(location.hash.slice(1)).get("request") ?? "";
    seek(page);
  };
  addEventListener("hashchange", read);
  page.onEntries = () => seek(page);
  read();
}

function seek(page) {
  const request = page.wanted && page.history.named(page.wanted);
  if (!request) return;
  if (page.pinned !== request.number) {
    page.pin(request.number);
    page.view.follow();
  }
  if (!request.ended || !page.view.following) return;
  const first = request.joins[0]?.ordinal ?? request.ended.ordinal;
  page.view.show(Math.max(page.history.first, first - ROOM), request.ended.ordinal + ROOM);
  page.wanted = "";
}
