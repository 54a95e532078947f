//! From a configuration to what runs.

use std::{collections::BTreeMap, sync::Arc};

use weact_infer::remote;

use super::{Bench, Selection, select};
use crate::{
    Error, Result,
    agent_method::{self, Prepared, ToolSource},
    config::{self, GraderChoice},
    grade::{
        self, Grader,
        judge::{self, Judge},
    },
    suite,
    world::{World, grade::WorldGrader},
};

/// The tasks of `selection` and their graders, each audited.
///
/// # Errors
/// If a file can't be read, a grader can't be made or fails its audit, or `selection` has an id that no benchmark knows.
pub fn benches(config: &config::Run, selection: &Selection) -> Result<Vec<Bench>> {
    let judge = judge(config)?;
    let mut unknown = selection.ids.clone().unwrap_or_default();
    let mut benches = Vec::new();
    for task in &config.benchmarks {
        let name = task.name();
        let mut tasks = suite::read(task.benchmark, &task.file)?;
        if task.grader == GraderChoice::Official {
            tasks = agent_method::asked(task.benchmark, tasks);
        }
        unknown.retain(|id| tasks.iter().all(|task| task.id != *id));
        tasks.truncate(task.limit.unwrap_or(usize::MAX));
        let tasks = select(tasks, selection, &name)?;
        let grader: Box<dyn Grader> = match task.grader {
            GraderChoice::World => {
                let world = task.world.as_ref().or(config.tools.world.as_ref());
                Box::new(WorldGrader::new(World::new(world.expect("the configuration was checked"))?))
            }
            GraderChoice::Official => grade::grader(task.benchmark, judge.clone(), grade::Options::default())?,
        };
        grade::audit(&*grader)?;
        benches.push(Bench { name, benchmark: task.benchmark, tasks, grader });
    }
    match unknown.first() {
        Some(id) => Err(Error::Other(format!("no benchmark has the task {id:?} ({} unknown ids)", unknown.len()))),
        None => Ok(benches),
    }
}

/// The methods, their files looked at, in order: all of them before the first one's weights are loaded.
///
/// # Errors
/// As [`agent_method::prepare`], with the method's name; or if tools can't be opened.
pub fn methods(config: &config::Run) -> Result<Vec<Prepared>> {
    let mut tools = BTreeMap::new();
    for task in &config.benchmarks {
        let world = task.world.as_ref().or(config.tools.world.as_ref());
        tools.insert(task.name(), ToolSource::open(&config.tools.spec, world)?);
    }
    let prepare = |method: &config::Method| {
        agent_method::prepare(method, &config.agent, tools.clone())
            .map_err(|error| Error::Other(format!("method {:?}: {error}", method.name)))
    };
    config.methods.iter().map(prepare).collect()
}

fn judge(config: &config::Run) -> Result<Option<Arc<Judge>>> {
    let Some(judge) = &config.judge else { return Ok(None) };
    let settings = remote::Settings { key_env: judge.key_env.clone(), ..remote::Settings::new(&judge.url, &judge.model) };
    let client = remote::Client::new(settings).map_err(|error| Error::Other(format!("[judge] {error}")))?;
    let settings = judge::Settings { votes: judge.votes, seed: config.seed, ..judge::Settings::default() };
    Ok(Some(Arc::new(Judge::new(Box::new(client), settings)?)))
}
