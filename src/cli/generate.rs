//! `weact generate`

use std::{collections::BTreeSet, fs, path::PathBuf, process::ExitCode, sync::Arc};

use clap::ArgGroup;
use serde::Deserialize;
use serde_json::{Value, json};
use weact::{
    core::{
        Capability, Error,
        chat::{Chat, ToolProtocol},
        message::Message,
        tokenizer::{self, Tokenizer},
    },
    infer::{
        engine::Engine,
        sampler::{Sampler, Sampling},
        session::Finish,
    },
};

use super::{
    Common,
    exit::Usage,
    model::{self, ModelArgs},
};

/// Continues a prompt
#[derive(Debug, clap::Args)]
#[command(group = ArgGroup::new("start").required(true).args(["prompt", "ids", "messages"]))]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The adapter that is active
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Text, encoded as it is
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Token ids; a model without tokenizer will do
    #[arg(long, value_name = "1,2,3", value_delimiter = ',')]
    ids: Option<Vec<u32>>,
    /// A JSON array of messages, or `{"messages","tools"}`: the next turn is written
    #[arg(long, value_name = "FILE")]
    messages: Option<PathBuf>,
    /// How tools reach the model: template or text
    #[arg(long, value_name = "PROTOCOL", default_value = "template")]
    tool_protocol: ToolProtocol,
    /// Most tokens to write
    #[arg(long, value_name = "N", default_value_t = 256)]
    max_new: usize,
    /// 0 takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f64,
    /// Draw from the smallest set of tokens with this probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// Draw from this many most likely tokens
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,
    /// Write on after end tokens
    #[arg(long)]
    ignore_eos: bool,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Conversation {
    Messages(Vec<Message>),
    WithTools { messages: Vec<Message>, tools: Option<Vec<Value>> },
}

/// Prints the new text, or the new ids where there is no tokenizer.
pub(super) fn run(args: &Args, common: &Common) -> anyhow::Result<ExitCode> {
    let sampling =
        Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: common.seed.unwrap_or(0) };
    let mut sampler = Sampler::new(sampling).map_err(|e| Usage(e.to_string()))?;
    let (_, device) = common.device.open()?;
    let checkpoint = args.model.open()?;
    let prompt = prompt(args)?;
    let adapter = args.adapter.as_ref().map(|dir| model::adapter(dir, &checkpoint, common.say)).transpose()?;

    let engine = Engine::new(Arc::new(checkpoint.load(&device, args.model.dtype)?), checkpoint.digest());
    let mut session = engine.session();
    if let Some(adapter) = &adapter {
        let alias = Capability::new("adapter").expect("a legal name");
        session.switch(Some((alias, engine.make_resident(adapter)?)));
    }
    session.append(&prompt.ids);
    let generated = session.generate(&mut sampler, args.max_new, &prompt.stop, &|| false, &mut |_| {})?;

    let finish = match generated.finish {
        Finish::Stop => "stop",
        Finish::Length => "length",
        Finish::Interrupted => "interrupted",
    };
    let spoken = match (generated.finish, generated.ids.split_last()) {
        (Finish::Stop, Some((_end, before))) => before,
        _ => generated.ids.as_slice(),
    };
    let text = prompt.tokenizer.map(|t| t.decode(spoken)).transpose()?;
    let shown = match &text {
        Some(text) => text.clone(),
        None => spoken.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
    };
    common.say.result(&shown, &json!({"ids": generated.ids, "text": text, "finish": finish}))?;
    Ok(ExitCode::SUCCESS)
}

/// Where writing starts.
struct Prompt {
    ids: Vec<u32>,
    stop: BTreeSet<u32>,
    tokenizer: Option<Tokenizer>,
}

fn prompt(args: &Args) -> anyhow::Result<Prompt> {
    let dir = &args.model.model;
    let mut prompt = if let Some(path) = &args.messages {
        let text = fs::read_to_string(path).map_err(|e| Error::io("can't read", path, e))?;
        let wrong = |e: serde_json::Error| Error::file(path, format!("is no list of messages: {e}"));
        // First as JSON, so that what is wrong with the text is told from what is wrong with its form.
        let value: Value = serde_json::from_str(&text).map_err(wrong)?;
        let (messages, tools) = match serde_json::from_value(value).map_err(wrong)? {
            Conversation::Messages(messages) => (messages, None),
            Conversation::WithTools { messages, tools } => (messages, tools),
        };
        let chat = Chat::open(dir, args.tool_protocol)?;
        let ids = chat.prompt(&messages, &tools.unwrap_or_default())?;
        let mut stop = chat.tokenizer.stop_ids().clone();
        stop.insert(chat.end_of_turn());
        Prompt { ids, stop, tokenizer: Some(chat.tokenizer) }
    } else {
        let tokenizer = Tokenizer::open(dir)?;
        let ids = match (&args.ids, &args.prompt, &tokenizer) {
            (Some(ids), _, _) => ids.clone(),
            (None, Some(text), Some(tokenizer)) => tokenizer.encode(text)?,
            _ => return Err(Error::file(dir, "has no tokenizer.json: give --ids instead of --prompt").into()),
        };
        let stop = tokenizer.as_ref().map_or_else(|| tokenizer::stop_ids(dir), |t| Ok(t.stop_ids().clone()))?;
        Prompt { ids, stop, tokenizer }
    };
    if args.ignore_eos {
        prompt.stop.clear();
    }
    Ok(prompt)
}
