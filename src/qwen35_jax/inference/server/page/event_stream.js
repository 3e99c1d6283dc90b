// The server's side of the page: requests of the OpenAI API, and answers that come as server-sent events.

/** A request that got no answer, or not all of it. Its message is for the person at the page. */
export class ServerError extends Error {
  /**
   * @param {string} message
   * @param {number} status of HTTP; 0 where the server was not reached, or an answer had begun
   */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/**
 * The first model that the server tells of, for its name and its room.
 * @param {string} key
 */
export async function servedModel(key) {
  const response = await asked("/v1/models", { headers: headersFor(key) });
  const listed = await response.json();
  return listed.data[0];
}

/**
 * Asks for an answer, and yields the pieces that it comes in, as objects of the API.
 * @param {object} request
 * @param {string} key
 * @param {AbortSignal} signal
 */
export async function* answerPieces(request, key, signal) {
  const response = await asked("/v1/chat/completions", {
    method: "POST",
    headers: { ...headersFor(key), "content-type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const piece = JSON.parse(data);
    if (piece.error) throw new ServerError(piece.error.message);
    yield piece;
  }
  throw new ServerError("The connection was lost before the answer had ended.");
}

/**
 * The data of each event in a stream of bytes, however the stream is cut into pieces.
 * @param {ReadableStream<Uint8Array>} body
 */
async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  let data = [];
  try {
    while (true) {
      const { done, value } = await read(reader);
      if (done) return;
      // A line may end in \r\n of which only the \r is there yet: it is looked at when the rest comes.
      const lines = (unread + value).split(/\r\n|\n|\r(?!$)/);
      unread = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the reader may have failed already, and has told so
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost before the answer had ended.");
  }
}

async function asked(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  throw new ServerError(await complaint(response), response.status);
}

async function complaint(response) {
  const body = await response.text();
  try {
    return JSON.parse(body).error.message;
  } catch {
    return `The server answered with status ${response.status}, and did not say why.`;
  }
}

function headersFor(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}
