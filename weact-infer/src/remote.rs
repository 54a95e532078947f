//! A chat model behind an OpenAI-compatible endpoint, asked one question at a time: what judges and annotators use.

use std::{
    fmt,
    io::{self, Read},
    thread,
    time::{Duration, Instant},
};

use reqwest::{
    StatusCode,
    blocking::{self, Response},
    header::{AUTHORIZATION, HeaderValue, RETRY_AFTER},
    redirect,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{Error, Result};

/// The longest body that is read, in bytes.
const BODY_LIMIT: u64 = 8 << 20;
/// The longest part of a server's own words that an error repeats, in characters.
const QUOTED_CHARS: usize = 300;
/// The longest wait between two tries.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Where the model is and how it answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// The endpoint, as `http://localhost:8000/v1` or with `/chat/completions` at its end.
    pub url: String,
    /// The model's name there.
    pub model: String,
    /// The environment variable that holds the API key; none sends none.
    #[serde(default)]
    pub key_env: Option<String>,
    /// Seconds for one try, from the connection to the last byte.
    #[serde(default = "default_timeout_s")]
    pub timeout_s: f64,
    /// Further tries after a failed connection, a timeout, or status 408, 429 or 5xx.
    #[serde(default = "default_retries")]
    pub retries: usize,
    /// Seconds before the first further try; doubled for each that follows. A server's `Retry-After` is obeyed, up to a minute.
    #[serde(default = "default_wait_s")]
    pub wait_s: f64,
    /// 0 takes the most likely token.
    #[serde(default)]
    pub temperature: f64,
    /// Most tokens of a reply.
    #[serde(default = "default_max_tokens")]
    pub max_tokens: usize,
}

fn default_timeout_s() -> f64 {
    120.0
}

fn default_retries() -> usize {
    4
}

fn default_wait_s() -> f64 {
    1.0
}

fn default_max_tokens() -> usize {
    2048
}

impl Settings {
    /// `model` at `url` without a key, greedy, with two minutes a try, four further tries and replies of at most 2048 tokens.
    pub fn new(url: &str, model: &str) -> Self {
        Self {
            url: url.to_owned(),
            model: model.to_owned(),
            key_env: None,
            timeout_s: default_timeout_s(),
            retries: default_retries(),
            wait_s: default_wait_s(),
            temperature: 0.0,
            max_tokens: default_max_tokens(),
        }
    }
}

/// A model's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// Its text.
    pub text: String,
    /// Why it ended, in the server's words: `stop`, `length`.
    pub finish: Option<String>,
}

/// An open way to one model. Blocking: it is not for use inside an asynchronous runtime.
pub struct Client {
    settings: Settings,
    endpoint: String,
    /// Never shown.
    key: Option<String>,
    http: blocking::Client,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("settings", &self.settings).finish_non_exhaustive()
    }
}

/// One try that gave no reply.
struct Failure {
    why: String,
    /// Whether another try may help.
    passing: bool,
    /// How long the server asks to wait.
    wait: Option<Duration>,
}

impl Client {
    /// Checks the settings and reads the key. Nothing is sent.
    ///
    /// # Errors
    /// If the URL is no http address or holds a password, the key's variable is not set or no header can carry its value, or a
    /// number is out of its range.
    pub fn new(settings: Settings) -> Result<Self> {
        let endpoint = endpoint(&settings.url)?;
        let key = settings.key_env.as_deref().map(read_key).transpose()?;
        if settings.model.is_empty() {
            return Err(Error::Other(format!("{endpoint}: the model has no name")));
        }
        for (name, value) in [("timeout_s", settings.timeout_s), ("wait_s", settings.wait_s)] {
            if !(value > 0.0 && value <= 86_400.0) {
                return Err(Error::Other(format!("{name} = {value}: it takes more than 0 and at most 86400 seconds")));
            }
        }
        if !(0.0..=2.0).contains(&settings.temperature) || settings.max_tokens == 0 {
            return Err(Error::Other("temperature goes from 0 to 2, and max_tokens is at least 1".to_owned()));
        }
        // A key must not follow a redirection to another host.
        let http = blocking::Client::builder().redirect(redirect::Policy::none()).build();
        let http = http.map_err(|e| Error::Other(format!("can't set up HTTP: {e}")))?;
        Ok(Self { settings, endpoint, key, http })
    }

    /// The model's name.
    pub fn model(&self) -> &str {
        &self.settings.model
    }

    /// Asks `user` once, under `system` where it is given. Servers that sample with seeds take `seed`.
    ///
    /// # Errors
    /// If no try gave a reply with text. The message says what came of the last one, and never holds the key.
    pub fn complete(&self, system: Option<&str>, user: &str, seed: Option<u64>) -> Result<Reply> {
        let Settings { model, temperature, max_tokens, .. } = &self.settings;
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let messages: Vec<Value> = system.iter().map(|text| message("system", text)).chain([message("user", user)]).collect();
        let mut body = json!({"model": model, "messages": messages, "temperature": temperature, "max_tokens": max_tokens});
        if let Some(seed) = seed {
            // JSON numbers above 2^53 are not safe in every server.
            body["seed"] = json!(seed & ((1 << 53) - 1));
        }
        let mut wait = Duration::from_secs_f64(self.settings.wait_s);
        let mut tries = 0;
        loop {
            tries += 1;
            let failure = match self.attempt(&body) {
                Ok(reply) => return Ok(reply),
                Err(failure) => failure,
            };
            if !failure.passing || tries > self.settings.retries {
                let after = if tries > 1 { format!(" (after {tries} tries)") } else { String::new() };
                return Err(Error::Other(format!("{}: {}{after}", self.endpoint, self.without_key(&failure.why))));
            }
            thread::sleep(failure.wait.unwrap_or(wait).min(LONGEST_WAIT));
            wait *= 2;
        }
    }

    fn attempt(&self, body: &Value) -> std::result::Result<Reply, Failure> {
        let timeout = Duration::from_secs_f64(self.settings.timeout_s);
        let deadline = Instant::now() + timeout;
        let mut request = self.http.post(&self.endpoint).timeout(timeout).json(body);
        if let Some(key) = &self.key {
            let mut value = HeaderValue::from_str(&format!("Bearer {key}")).expect("checked when the key was read");
            value.set_sensitive(true);
            request = request.header(AUTHORIZATION, value);
        }
        let passing = |why: String| Failure { why, passing: true, wait: None };
        let lasting = |why: String| Failure { why, passing: false, wait: None };
        let response = request.send().map_err(|error| passing(explain(error)))?;
        let status = response.status();
        let wait = retry_after(&response);
        let text = read_body(response, deadline).map_err(|error| passing(format!("can't read the reply: {error}")))?;
        let Some(text) = text else { return Err(lasting(format!("the reply is longer than {BODY_LIMIT} bytes"))) };
        if !status.is_success() {
            let passing =
                status.is_server_error() || [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status);
            return Err(Failure { why: refusal(status, &text), passing, wait });
        }
        parse(&text).map_err(lasting)
    }

    /// Servers repeat a key that they refuse.
    fn without_key(&self, text: &str) -> String {
        self.key.as_ref().map_or_else(|| text.to_owned(), |key| text.replace(key.as_str(), "***"))
    }
}

/// The address that requests go to.
fn endpoint(url: &str) -> Result<String> {
    const PATH: &str = "/chat/completions";
    let parsed = reqwest::Url::parse(url).map_err(|e| Error::Other(format!("{url:?} is no address: {e}")))?;
    if !["http", "https"].contains(&parsed.scheme()) {
        return Err(Error::Other(format!("{url:?}: an endpoint's address begins with http:// or https://")));
    }
    if !parsed.username().is_empty() || parsed.password().is_some() || parsed.query().is_some() || parsed.fragment().is_some() {
        let host = parsed.host_str().unwrap_or_default();
        let why = "an endpoint's address holds no user, password or query: name an environment variable that holds the key";
        return Err(Error::Other(format!("the address at {host}: {why}")));
    }
    let base = parsed.as_str().trim_end_matches('/');
    Ok(if base.ends_with(PATH) { base.to_owned() } else { format!("{base}{PATH}") })
}

fn read_key(variable: &str) -> Result<String> {
    let key = std::env::var(variable).map_err(|error| match error {
        std::env::VarError::NotPresent => Error::Other(format!("the environment variable {variable} is not set")),
        std::env::VarError::NotUnicode(_) => Error::Other(format!("the environment variable {variable} holds no text")),
    })?;
    let key = key.trim();
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(Error::Other(format!("the environment variable {variable} holds no key: one word of ASCII is one")));
    }
    Ok(key.to_owned())
}

/// A failed connection in its own words, without the address, which the caller adds.
fn explain(error: reqwest::Error) -> String {
    if error.is_timeout() {
        return "no reply in time".to_owned();
    }
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(&error);
    while let Some(inner) = cause {
        text.push_str(&format!(": {inner}"));
        cause = inner.source();
    }
    text
}

fn retry_after(response: &Response) -> Option<Duration> {
    let seconds: u64 = response.headers().get(RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// The body; none where it is too long.
fn read_body(response: Response, deadline: Instant) -> io::Result<Option<String>> {
    let mut response = response.take(BODY_LIMIT + 1);
    let (mut body, mut chunk) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        if Instant::now() > deadline {
            return Err(io::Error::new(io::ErrorKind::TimedOut, "it did not end in time"));
        }
        match response.read(&mut chunk)? {
            0 => break,
            n => body.extend_from_slice(&chunk[..n]),
        }
    }
    if body.len() as u64 > BODY_LIMIT {
        return Ok(None);
    }
    String::from_utf8(body).map(Some).map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "it is no UTF-8"))
}

/// A status with what the server says about it.
fn refusal(status: StatusCode, body: &str) -> String {
    let value: Option<Value> = serde_json::from_str(body).ok();
    let said = value.as_ref().and_then(|v| v["error"]["message"].as_str().or(v["error"].as_str()).or(v["message"].as_str()));
    let said: String = said.unwrap_or(body).split_whitespace().collect::<Vec<_>>().join(" ").chars().take(QUOTED_CHARS).collect();
    if said.is_empty() { format!("status {status}") } else { format!("status {status}: {said}") }
}

fn parse(body: &str) -> std::result::Result<Reply, String> {
    let value: Value = serde_json::from_str(body).map_err(|e| format!("the reply is no JSON: {e}"))?;
    let choice = &value["choices"][0];
    let Some(text) = choice["message"]["content"].as_str() else {
        return Err("the reply has no text at choices[0].message.content".to_owned());
    };
    Ok(Reply { text: text.to_owned(), finish: choice["finish_reason"].as_str().map(str::to_owned) })
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        net::TcpListener,
        sync::mpsc,
    };

    use super::*;

    /// A server that answers one request after the other with `replies`, and hands out what it was asked: head and body.
    fn serve(replies: Vec<String>) -> (String, mpsc::Receiver<(String, Value)>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = format!("http://{}/v1", listener.local_addr().expect("bound"));
        let (sender, receiver) = mpsc::channel();
        thread::spawn(move || {
            for reply in replies {
                let Ok((stream, _)) = listener.accept() else { return };
                let mut stream = BufReader::new(stream);
                let (mut head, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    let n = stream.read_line(&mut line).expect("readable");
                    if n <= 2 {
                        break;
                    }
                    if let Some(n) = line.to_lowercase().strip_prefix("content-length:") {
                        length = n.trim().parse().expect("a number");
                    }
                    head.push_str(&line);
                }
                let mut body = vec![0; length];
                stream.read_exact(&mut body).expect("a body");
                let _unheard = sender.send((head, serde_json::from_slice(&body).unwrap_or_default()));
                let _gone = stream.get_mut().write_all(reply.as_bytes());
            }
        });
        (address, receiver)
    }

    fn http(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
    }

    fn ok(text: &str) -> String {
        let reply = json!({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]});
        http("200 OK", &reply.to_string())
    }

    fn settings(url: &str) -> Settings {
        Settings { wait_s: 0.001, retries: 2, timeout_s: 20.0, ..Settings::new(url, "m") }
    }

    #[test]
    fn a_request_says_all_that_decides_the_reply() {
        let (url, asked) = serve(vec![ok("yes")]);
        let client = Client::new(Settings { temperature: 0.5, max_tokens: 7, ..settings(&url) }).expect("legal");
        let reply = client.complete(Some("be brief"), "is it?", Some(u64::MAX)).expect("a reply");
        assert_eq!(reply, Reply { text: "yes".to_owned(), finish: Some("stop".to_owned()) });
        let (head, body) = asked.recv().expect("it was asked");
        assert!(head.starts_with("POST /v1/chat/completions "), "{head}");
        assert!(!head.to_lowercase().contains("authorization"));
        let expected = json!({"model": "m", "temperature": 0.5, "max_tokens": 7, "seed": 9_007_199_254_740_991_u64,
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "is it?"}]});
        assert_eq!(body, expected);
    }

    /// Replies in a row, and the text or the words of the error, with the number of requests made.
    #[test]
    fn only_passing_failures_are_tried_again() {
        let (busy, down) = (http("429 Too Many Requests", r#"{"error": {"message": "slow down"}}"#), http("503 X", "later"));
        let cut = "HTTP/1.1 200 OK\r\nContent-Length: 50\r\nConnection: close\r\n\r\n{".to_owned();
        for (replies, expected, n_asked) in [
            (vec![busy.clone(), down.clone(), ok("at last")], Ok("at last"), 3),
            (vec![cut, ok("whole")], Ok("whole"), 2),
            (
                vec![busy.clone(), busy.clone(), busy, ok("never")],
                Err("status 429 Too Many Requests: slow down (after 3 tries)"),
                3,
            ),
            (
                vec![http("400 Bad Request", r#"{"error": "no such model"}"#), ok("never")],
                Err("status 400 Bad Request: no such model"),
                1,
            ),
            (vec![http("302 Found", ""), ok("never")], Err("status 302 Found"), 1),
            (vec![http("200 OK", "<html>"), ok("never")], Err("the reply is no JSON"), 1),
            (vec![http("200 OK", r#"{"choices": [{"message": {"content": null}}]}"#), ok("never")], Err("has no text"), 1),
            (vec![http("200 OK", &" ".repeat(9 << 20)), ok("never")], Err("longer than 8388608 bytes"), 1),
        ] {
            let (url, asked) = serve(replies);
            let reply = Client::new(settings(&url)).expect("legal").complete(None, "q", None);
            match (reply, expected) {
                (Ok(reply), Ok(text)) => assert_eq!(reply.text, text),
                (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
                (reply, expected) => panic!("{reply:?}, expected {expected:?}"),
            }
            assert_eq!(asked.try_iter().count(), n_asked, "{expected:?}");
        }
    }

    #[test]
    fn a_server_that_is_not_there_is_named() {
        let port = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
        let client = Client::new(settings(&format!("http://{port}"))).expect("legal");
        let error = client.complete(None, "q", None).expect_err("nobody listens").to_string();
        assert!(error.contains(&port.to_string()) && error.contains("after 3 tries"), "{error}");
    }

    /// A variable that cargo sets stands for a key here.
    #[test]
    fn the_key_is_sent_and_never_shown() {
        let key = std::env::var("CARGO_PKG_NAME").expect("set by cargo");
        let refused = http("401 Unauthorized", &json!({"error": {"message": format!("bad key {key}")}}).to_string());
        let (url, asked) = serve(vec![refused]);
        let client = Client::new(Settings { key_env: Some("CARGO_PKG_NAME".to_owned()), ..settings(&url) }).expect("legal");
        let error = client.complete(None, "q", None).expect_err("refused").to_string();
        let (head, _) = asked.recv().expect("it was asked");
        assert!(head.contains(&format!("Bearer {key}")), "{head}");
        for shown in [error, format!("{client:?}")] {
            assert!(!shown.contains(&key), "{shown}");
        }
    }

    #[test]
    fn settings_that_cannot_work_are_refused() {
        let check = |change: &dyn Fn(&mut Settings), words: &str| {
            let mut settings = Settings::new("http://localhost/v1", "m");
            change(&mut settings);
            let error = Client::new(settings).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        };
        check(&|s| s.url = "localhost:8000".to_owned(), "begins with http");
        check(&|s| s.url = "file:///etc/passwd".to_owned(), "begins with http");
        check(&|s| s.url = "http://me:secret@host/v1".to_owned(), "the address at host: ");
        check(&|s| s.key_env = Some("WEACT_NO_SUCH_VARIABLE".to_owned()), "WEACT_NO_SUCH_VARIABLE is not set");
        check(&|s| s.model.clear(), "no name");
        check(&|s| s.timeout_s = f64::NAN, "timeout_s");
        check(&|s| s.temperature = -1.0, "temperature");
        for (url, expected) in [
            ("http://h/v1", "http://h/v1/chat/completions"),
            ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
            ("https://h/chat/completions", "https://h/chat/completions"),
        ] {
            assert_eq!(endpoint(url).expect(url), expected);
        }
    }
}
