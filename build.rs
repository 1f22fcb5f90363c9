// SPDX-License-Identifier: Apache-2.0
//! Compiles `cuda/*.cu` with nvcc, one fatbin per file, which `rust/cuda` embeds.
//!
//! nvcc is the first of: `NVCC`; `bin/nvcc` in `CUDA_HOME` or `CUDA_PATH`; `nvcc` on `PATH`; the
//! wheels `nvidia-cuda-nvcc` and companions (cuda/README.md) in `VIRTUAL_ENV`, in `.venv`, or of
//! `PYTHON` or `python3`. `DDTREE_CUDA_ARCHS=90a,120` builds only these architectures, without PTX.

use std::collections::BTreeMap;
use std::env;
use std::fmt::Write as _;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Command, exit};
use std::sync::Mutex;

/// Machine code for the cards that people have, and PTX for those that come after.
const ARCHS: &str = "80,90a,100,120";
const PTX: [&str; 2] = ["80", "120"];
/// Files with instructions of one architecture only.
const ONLY: [(&str, &str); 1] = [("_sm90.cu", "90a")];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    println!("cargo::rustc-env=DDTREE_GIT={}", git_commit(&root));
    if env::var("CARGO_CFG_TARGET_OS").is_ok_and(|os| os == "linux") {
        // the number is DDT_ABI_VERSION: a program asks the loader for the ABI that it was built with
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libddtree.so.1");
    }
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    println!("cargo::rerun-if-changed=cuda");
    for name in ["NVCC", "CUDA_HOME", "CUDA_PATH", "VIRTUAL_ENV", "PYTHON", "DDTREE_CUDA_ARCHS"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let nvcc = find_nvcc(&root).unwrap_or_else(|| {
        fail(
            "no nvcc found, which the CUDA backend needs. Install CUDA 13.0 or later and set NVCC or CUDA_HOME, or \
             `pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' \
             'nvidia-cuda-runtime==13.0.*' 'nvidia-cuda-cccl==13.0.*'` and set PYTHON to that python; \
             or build for the CPU alone with `--no-default-features`",
        )
    });
    let requested = env::var("DDTREE_CUDA_ARCHS").ok();
    let archs: Vec<String> =
        requested.as_deref().unwrap_or(ARCHS).split(',').map(|arch| arch.trim().to_owned()).collect();
    let ptx: &[&str] = if requested.is_some() { &[] } else { &PTX };

    let jobs: Vec<Job> = sources(&root)
        .into_iter()
        .filter_map(|source| Job::new(&nvcc, &root, &out, source, &archs, ptx))
        .collect();
    compile(&jobs);

    let mut code =
        String::from("pub(super) fn fatbin(stem: &str) -> Option<&'static [u8]> {\n    match stem {\n");
    for job in &jobs {
        // the driver wants the image aligned, which include_bytes! alone does not promise
        writeln!(
            code,
            "        {:?} => Some(&{{ #[repr(align(64))] struct Image<T: ?Sized>(T); \
             static IMAGE: &Image<[u8]> = &Image(*include_bytes!({:?})); IMAGE }}.0),",
            job.stem,
            job.fatbin.display().to_string()
        )
        .expect("a string");
    }
    code.push_str("        _ => None,\n    }\n}\n");
    let names =
        |prefix: &str, list: &[String]| list.iter().map(|arch| format!("{prefix}{arch}")).collect::<Vec<_>>();
    let mut built = names("sm_", &archs);
    built.extend(names("compute_", &ptx.iter().map(|&arch| arch.to_owned()).collect::<Vec<_>>()));
    write!(code, "/// What the fatbins hold.\npub(crate) const ARCHS: &str = {:?};\n", built.join(","))
        .expect("a string");
    fs::write(out.join("fatbins.rs"), code)
        .unwrap_or_else(|error| fail(&format!("cannot write fatbins.rs: {error}")));
    println!("cargo::rustc-env=DDTREE_CUDA_ARCHS_BUILT={}", built.join(","));
}

/// The commit of a checkout, with "+" if sources of the library differ from it; else "unknown".
fn git_commit(root: &Path) -> String {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    // a copy of the sources inside of another project must not name that one's commit
    let is_ours = |top: &String| Path::new(top).canonicalize().ok() == root.canonicalize().ok();
    let (Some(_), Some(commit), Some(log)) = (
        git(&["rev-parse", "--show-toplevel"]).filter(is_ours),
        git(&["rev-parse", "--short=12", "HEAD"]),
        git(&["rev-parse", "--git-path", "logs/HEAD"]),
    ) else {
        return "unknown".into();
    };
    const SOURCES: [&str; 5] = ["rust", "cuda", "build.rs", "Cargo.toml", "Cargo.lock"];
    for path in SOURCES.into_iter().chain([log.as_str()]) {
        println!("cargo::rerun-if-changed={path}");
    }
    let is_clean = git(&[&["diff", "--quiet", "HEAD", "--"], SOURCES.as_slice()].concat()).is_some();
    commit + if is_clean { "" } else { "+" }
}

fn fail(text: &str) -> ! {
    // cargo shows a build script's output only when it fails
    eprintln!("ddtree: {text}");
    exit(1)
}

fn sources(root: &Path) -> Vec<PathBuf> {
    let folder = root.join("cuda");
    let entries =
        fs::read_dir(&folder).unwrap_or_else(|error| fail(&format!("{}: {error}", folder.display())));
    let mut files: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|it| it == "cu"))
        .collect();
    files.sort();
    files
}

/// One .cu file.
struct Job {
    stem: String,
    source: PathBuf,
    fatbin: PathBuf,
    arguments: Vec<String>,
    nvcc: PathBuf,
    stamp: String,
}

impl Job {
    /// `None` for a file of an architecture that is not built.
    fn new(
        nvcc: &Path,
        root: &Path,
        out: &Path,
        source: PathBuf,
        archs: &[String],
        ptx: &[&str],
    ) -> Option<Self> {
        let name = source.file_name()?.to_str()?.to_owned();
        let only = ONLY.iter().find(|(suffix, _)| name.ends_with(suffix)).map(|&(_, arch)| arch);
        let archs: Vec<&str> =
            archs.iter().map(String::as_str).filter(|&arch| only.is_none_or(|only| only == arch)).collect();
        let ptx = if only.is_some() { &[] } else { ptx };
        if archs.is_empty() && ptx.is_empty() {
            return None;
        }
        let stem = name.trim_end_matches(".cu").to_owned();
        // -Xptxas -v: registers and spills, which `ci/run.sh archs` reads
        let mut arguments: Vec<String> =
            ["-fatbin", "-O3", "-std=c++17", "-Xptxas", "-v", "-I"].map(str::to_owned).to_vec();
        arguments.push(root.join("cuda").display().to_string());
        for arch in archs {
            arguments.push("-gencode".into());
            arguments.push(format!("arch=compute_{arch},code=sm_{arch}"));
        }
        for arch in ptx {
            arguments.push("-gencode".into());
            arguments.push(format!("arch=compute_{arch},code=compute_{arch}"));
        }
        let fatbin = out.join(format!("{stem}.fatbin"));
        let stamp = stamp(root, &source, nvcc, &arguments);
        Some(Self { stem, source, fatbin, arguments, nvcc: nvcc.to_owned(), stamp })
    }

    fn stamp_file(&self) -> PathBuf {
        self.fatbin.with_extension("stamp")
    }

    fn is_done(&self) -> bool {
        self.fatbin.exists() && fs::read_to_string(self.stamp_file()).is_ok_and(|stamp| stamp == self.stamp)
    }

    fn run(&self) -> Result<(), String> {
        let output = Command::new(&self.nvcc)
            .args(&self.arguments)
            .arg(&self.source)
            .arg("-o")
            .arg(&self.fatbin)
            .output()
            .map_err(|error| format!("cannot run {}: {error}", self.nvcc.display()))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        if !output.status.success() {
            return Err(format!("nvcc failed on {}:\n{log}", self.source.display()));
        }
        fs::write(self.fatbin.with_extension("ptxas"), &log)
            .and_then(|()| fs::write(self.stamp_file(), &self.stamp))
            .map_err(|error| format!("cannot write beside {}: {error}", self.fatbin.display()))
    }
}

/// Changes whenever the fatbin could: nvcc, flags, the file, any header.
fn stamp(root: &Path, source: &Path, nvcc: &Path, arguments: &[String]) -> String {
    let mut files = BTreeMap::new();
    for folder in ["cuda", "cuda/params"] {
        for entry in fs::read_dir(root.join(folder)).into_iter().flatten().flatten() {
            let path = entry.path();
            if path == source || path.extension().is_some_and(|it| it == "h" || it == "cuh") {
                files.insert(path.clone(), fs::read(&path).unwrap_or_default());
            }
        }
    }
    let mut hasher = DefaultHasher::new();
    (nvcc, arguments, files).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Runs what is not up to date, as many at a time as there are cores.
fn compile(jobs: &[Job]) {
    let queue = Mutex::new(jobs.iter().filter(|job| !job.is_done()).collect::<Vec<_>>());
    let errors = Mutex::new(Vec::new());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let Some(job) = queue.lock().expect("no panic holds it").pop() else {
                        return;
                    };
                    if let Err(error) = job.run() {
                        errors.lock().expect("no panic holds it").push(error);
                    }
                }
            });
        }
    });
    let errors = errors.into_inner().expect("no panic holds it");
    if !errors.is_empty() {
        fail(&errors.join("\n"));
    }
}

fn find_nvcc(root: &Path) -> Option<PathBuf> {
    if let Some(nvcc) = env::var_os("NVCC").filter(|nvcc| !nvcc.is_empty()) {
        return Some(nvcc.into());
    }
    let exists = |path: PathBuf| path.is_file().then_some(path);
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(nvcc) = env::var_os(name).and_then(|home| exists(Path::new(&home).join("bin/nvcc"))) {
            return Some(nvcc);
        }
    }
    let path = env::var_os("PATH").unwrap_or_default();
    if let Some(nvcc) = env::split_paths(&path).find_map(|folder| exists(folder.join("nvcc"))) {
        return Some(nvcc);
    }
    let mut pythons: Vec<PathBuf> = Vec::new();
    pythons.extend(env::var_os("VIRTUAL_ENV").map(|it| Path::new(&it).join("bin/python")));
    pythons.push(root.join(".venv/bin/python"));
    pythons.extend(env::var_os("PYTHON").map(PathBuf::from));
    pythons.push("python3".into());
    pythons.into_iter().find_map(|python| {
        let code = "import sysconfig; print(sysconfig.get_path('purelib'))";
        let output = Command::new(python).args(["-c", code]).output().ok()?;
        let site = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
        // all CUDA 13 wheels install into one tree
        exists(site.join("nvidia/cu13/bin/nvcc"))
    })
}
