// Requests that generate: an answer as it arrives, as a series of changes.

// Returns the data of each server-sent event of a response.
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6).trimEnd();
  }
}

export class RequestError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `the server answered ${status}`);
    [this.status, this.code, this.retryAfter] = [status, error?.code ?? "", Number(retryAfter) || 0];
  }
}

export async function errorOf(response) {
  const body = await response.json().catch(() => null);
  return new RequestError(response.status, body?.error, response.headers.get("retry-after"));
}

// Sends a request with `stream`, and yields {id, content, reasoning, calls, usage, finish, replica} of each event.
export async function* generated(service, path, body, signal) {
  const options = { include_usage: true, continuous_usage_stats: true };
  const response = await service.fetch(path, {
    method: "POST", body: { ...body, stream: true, stream_options: options }, signal });
  if (!response.ok) throw await errorOf(response);
  const replica = response.headers.get("x-slotwise-replica") ?? "";
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new RequestError(response.status, event.error);
    const choice = event.choices?.[0], delta = choice?.delta ?? {};
    yield {
      id: event.id, usage: event.usage ?? choice?.usage ?? null, finish: choice?.finish_reason ?? "", replica,
      content: delta.content ?? choice?.text ?? "", reasoning: delta.reasoning_content ?? delta.reasoning ?? "",
      calls: delta.tool_calls ?? [],
    };
  }
}
