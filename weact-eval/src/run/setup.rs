//! From a configuration to what runs.

use std::{collections::BTreeMap, sync::Arc};

use weact_infer::remote;

use super::{Bench, Selection, select};
use crate::{
    Error, Result,
    agent_method::{self, Prepared, ToolSource},
    benchmark::Benchmark,
    config::{self, GraderChoice},
    grade::{
        self, Grader,
        judge::{self, Judge},
    },
    suite,
    task::Task,
    world::{World, grade::WorldGrader},
};

/// The tasks that `config` and `selection` both select, and their graders, each audited.
///
/// # Errors
/// If a file can't be read, a grader can't be made, fails its audit or does not know a task, or an id is selected that there is not.
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
        if let Some(id) = task.ids.iter().flatten().find(|id| tasks.iter().all(|task| task.id != **id)) {
            return Err(Error::Other(format!("benchmark {name:?}: ids: {} has no task {id:?}", task.file.display())));
        }
        let own = Selection { ids: task.ids.clone(), limit: task.limit.map(|n| n as f64), shard: None };
        let tasks = select(tasks, &own, &name)?;
        unknown.retain(|id| tasks.iter().all(|task| task.id != *id));
        let tasks = select(tasks, selection, &name)?;
        let grader: Box<dyn Grader> = match task.grader {
            GraderChoice::World => {
                let world = task.world.as_ref().or(config.tools.world.as_ref());
                Box::new(WorldGrader::new(World::new(world.expect("the configuration was checked"))?))
            }
            GraderChoice::Official => grade::grader(task.benchmark, judge.clone(), grade::Options::default())?,
        };
        grade::audit(&*grader)?;
        check_gradable(&name, task.benchmark, &tasks, &*grader)?;
        benches.push(Bench { name, benchmark: task.benchmark, tasks, grader });
    }
    match unknown.first() {
        Some(id) => {
            let n = unknown.len();
            Err(Error::Other(format!("no benchmark has the task {id:?} among those that are configured ({n} such ids)")))
        }
        None => Ok(benches),
    }
}

/// Before hours of answering: no grader refuses a task as it stands. Nothing is judged.
fn check_gradable(name: &str, benchmark: Benchmark, tasks: &[Task], grader: &dyn Grader) -> Result<()> {
    for task in tasks {
        if let Err(error) = grader.grade(task, None) {
            // The reason may quote the question.
            let why = if benchmark.is_secret() { String::new() } else { format!(": {error}") };
            return Err(Error::Other(format!("benchmark {name:?}: {} can't grade task {:?}{why}", grader.id(), task.id)));
        }
    }
    Ok(())
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
