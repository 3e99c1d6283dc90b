// The chat: what was said, what is asked next, and the controls around it.

import { AnswerView } from "/page/answer_view.js";
import { answerPieces, servedModel, ServerError } from "/page/event_stream.js";

const AT_THE_END = 40; // pixels from the end at which the conversation still follows what comes
const MOST_HEIGHT = 240; // pixels of the message's field
const WIDE = matchMedia("(min-width: 64rem)"); // as in style.css: the settings stand beside the conversation

const page = Object.fromEntries(
  [...document.querySelectorAll("[id]")].map((element) => [element.id, element]),
);
let messages = []; // of the conversation, as the API has them
let running = null; // what stops the answer that is coming
let charactersPerToken = 4; // of the last answer; before there is one, of English

async function answer() {
  const turn = newTurn("answer-turn");
  const view = new AnswerView(turn, charactersPerToken, follow(turn));
  scrollToEnd();
  const stopping = new AbortController();
  const asked = messages;
  begin(stopping);
  try {
    for await (const piece of answerPieces(request(), page.key.value, stopping.signal)) view.take(piece);
    view.end(view.finishReason === "length" ? "cut off: no room for more tokens" : "");
    tell("The answer is complete.");
  } catch (error) {
    if (error.name === "AbortError") {
      view.end("stopped");
      tell("The answer was stopped.");
    } else {
      view.fail(told(error));
      askForKey(error);
    }
  } finally {
    if (running === stopping) finish();
  }
  charactersPerToken = view.charactersPerToken;
  if (messages !== asked) return; // a new chat has begun
  if (view.content) messages.push({ role: "assistant", content: view.content });
  offer(turn, view);
}

function request() {
  const system = page.system.value.trim();
  const asked = { messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  for (const [field, input] of [
    ["temperature", page.temperature],
    ["top_p", page["top-p"]],
    ["max_completion_tokens", page["max-tokens"]],
  ]) {
    if (input.value !== "") asked[field] = input.valueAsNumber;
  }
  if (page.thinking.value) asked.chat_template_kwargs = { enable_thinking: page.thinking.value === "on" };
  return asked;
}

function send() {
  const text = page.message.value.trim();
  if (running || !text) return;
  if (!page["settings-form"].checkValidity()) {
    showSettings(true);
    page["settings-form"].reportValidity();
    return;
  }
  messages.push({ role: "user", content: text });
  newTurn("user-turn").querySelector(".text").textContent = text;
  page.message.value = "";
  fitMessage();
  answer();
}

/** Offers what can be done with an answer that has ended. */
function offer(turn, view) {
  const copy = turn.querySelector(".copy");
  copy.hidden = !view.content || !navigator.clipboard;
  copy.addEventListener("click", async () => {
    await navigator.clipboard.writeText(view.content);
    tell("The answer was copied.");
  });
  const again = turn.querySelector(".again");
  again.hidden = false;
  again.addEventListener("click", () => {
    if (running) return;
    turn.remove();
    if (messages.at(-1).role === "assistant") messages.pop();
    answer();
  });
  // Only the last answer can be asked for again: what follows an earlier one was said to it.
  for (const earlier of page.turns.querySelectorAll(".answer:not(:last-child) .again")) earlier.remove();
}

function newChat() {
  running?.abort();
  messages = [];
  page.turns.replaceChildren();
  page.welcome.hidden = false;
  page.message.focus();
  tell("A new chat has begun.");
}

function begin(stopping) {
  running = stopping;
  page.send.hidden = true;
  page.stop.hidden = false;
  tell("The answer is coming.");
}

function finish() {
  running = null;
  page.send.hidden = false;
  page.stop.hidden = true;
}

function stop() {
  running?.abort();
  page.message.focus();
}

function newTurn(template) {
  page.welcome.hidden = true;
  page.turns.append(page[template].content.cloneNode(true));
  return page.turns.lastElementChild;
}

/** Tells those who do not see the page. */
function tell(text) {
  page.status.textContent = text;
}

function told(error) {
  if (error instanceof ServerError) return error.message;
  console.error(error);
  return `The page failed: ${error.message}`;
}

function askForKey(error) {
  if (error.status !== 401) return;
  page["key-form"].hidden = false;
  showSettings(true);
  page.key.focus();
}

async function showModel() {
  try {
    const model = await servedModel(page.key.value);
    page.model.textContent = model.id;
    page["key-hint"].textContent = "The server takes this key.";
    if (model.max_model_len) page["max-tokens"].max = model.max_model_len;
    return true;
  } catch (error) {
    page["key-hint"].textContent = told(error);
    tell(told(error));
    askForKey(error);
    return false;
  }
}

function showSettings(shown) {
  page.settings.hidden = !shown;
  page["settings-toggle"].setAttribute("aria-expanded", String(shown));
}

function scrollToEnd() {
  page.conversation.scrollTop = page.conversation.scrollHeight;
}

/** Keeps the end of the conversation in view, unless the person has scrolled away from it. */
function follow(turn) {
  let height = page.conversation.scrollHeight;
  return () => {
    const { scrollTop, clientHeight, scrollHeight } = page.conversation;
    if (turn.isConnected && height - scrollTop - clientHeight < AT_THE_END) scrollToEnd();
    height = scrollHeight;
  };
}

function fitMessage() {
  page.message.style.height = "auto";
  page.message.style.height = `${Math.min(page.message.scrollHeight, MOST_HEIGHT)}px`;
}

page.composer.addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
page.message.addEventListener("keydown", (event) => {
  // Enter also ends the spelling of a character in some scripts, and then sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
page.message.addEventListener("input", fitMessage);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
page.stop.addEventListener("click", stop);
page["new-chat"].addEventListener("click", newChat);
page["settings-toggle"].addEventListener("click", () => showSettings(page.settings.hidden));
page["settings-form"].addEventListener("submit", (event) => event.preventDefault());
page["key-form"].addEventListener("submit", async (event) => {
  event.preventDefault();
  if (await showModel()) page.message.focus();
});

WIDE.addEventListener("change", () => showSettings(WIDE.matches));

showSettings(WIDE.matches);
showModel();
