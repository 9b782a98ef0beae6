//! Valid, broken and malicious archives of all formats.

use std::fs::File;
use std::io::{Cursor, Write};

use flate2::Compression;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use super::*;

const MANIFEST: &str = r#"{"createdOn": "today", "runtime": "python", "model": {"modelName": "noop", "modelVersion": "1.11",
    "handler": "service.py:handle", "configFile": "model-config.yaml"}, "archiverVersion": "0.12.0"}"#;

/// A temporary directory with a model store and a work directory, and settings that name them.
struct Fixture {
    folder: TempDir,
    settings: Settings,
}

impl Fixture {
    fn new(properties: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("store")).unwrap();
        let store = folder.path().join("store").to_string_lossy().into_owned();
        let mut all = vec![("model_store".to_owned(), store)];
        all.extend(properties.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())));
        let (settings, _) = Settings::new(all, Vec::new(), folder.path().to_owned()).unwrap();
        Self { folder, settings }
    }

    fn store(&self, name: &str) -> PathBuf {
        self.folder.path().join("store").join(name)
    }

    fn open(&self, url: &str) -> Result<Archive, ErrorResponse> {
        open(&self.settings, url, &RegistrationParameters::default(), &watch::channel(false).1)
    }

    /// Returns the number of unpacked archives that are left.
    fn left(&self) -> usize {
        fs::read_dir(self.folder.path().join("models")).map_or(0, Iterator::count)
    }
}

fn mar(path: &Path, files: &[(&str, &str)]) {
    let mut writer = ZipWriter::new(File::create(path).unwrap());
    for (name, content) in files {
        writer.start_file(*name, SimpleFileOptions::default()).unwrap();
        writer.write_all(content.as_bytes()).unwrap();
    }
    writer.finish().unwrap();
}

fn tar_gz(path: &Path, files: &[(EntryType, &str, &str)]) {
    let mut builder =
        Builder::new(GzEncoder::new(File::create(path).unwrap(), Compression::fast()));
    for (kind, name, content) in files {
        let mut header = Header::new_gnu();
        header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        let data = if *kind == EntryType::Regular { content.as_bytes() } else { &[] };
        header.set_size(data.len() as u64);
        if data.is_empty() && !content.is_empty() {
            header.set_link_name_literal(content).unwrap();
        }
        header.set_cksum();
        builder.append(&header, data).unwrap();
    }
    builder.into_inner().unwrap().finish().unwrap();
}

const FILES: [(&str, &str); 3] = [
    ("MAR-INF/MANIFEST.json", MANIFEST),
    ("service.py", "def handle(data, context):\n    return data\n"),
    ("model-config.yaml", "batchSize: 4\nresponseTimeout: soon\nhandler:\n  profile: true\n"),
];

#[test]
fn archives_of_all_forms_are_opened() {
    let fixture = Fixture::new(&[]);
    mar(&fixture.store("noop.mar"), &FILES);
    let files = FILES.map(|(name, content)| (EntryType::Regular, name, content));
    tar_gz(&fixture.store("noop.tar.gz"), &files);
    // SageMaker packs all files in one directory.
    let nested = FILES.map(|(name, content)| (format!("top/{name}"), content));
    tar_gz(
        &fixture.store("nested.tar.gz"),
        &nested.each_ref().map(|(name, content)| (EntryType::Regular, name.as_str(), *content)),
    );
    for (name, content) in FILES {
        let path = fixture.store("directory").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let directory = fixture.store("directory");
    let url = format!("file://{}", fixture.store("noop.mar").display());
    for url in
        ["noop.mar", "noop.tar.gz", "nested.tar.gz", "directory", directory.to_str().unwrap(), &url]
    {
        let archive = fixture.open(url).unwrap();
        assert_eq!(
            (archive.model_name.as_str(), archive.version.as_str()),
            ("noop", "1.11"),
            "{url}"
        );
        assert_eq!(
            (archive.handler.as_deref(), archive.url.as_str()),
            (Some("service.py:handle"), url)
        );
        assert_eq!(
            (archive.yaml.model.batch_size, archive.yaml.model.response_timeout),
            (Some(4), None)
        );
        assert_eq!(archive.yaml.whole["handler"]["profile"], true);
        let source = fs::read_to_string(archive.directory.path().join("service.py")).unwrap();
        assert_eq!(source, FILES[1].1);
    }
    assert_eq!(fixture.left(), 0, "dropping the last owner removes the unpacked files");
    assert!(directory.join("service.py").is_file(), "a directory of the user is kept");
}

#[test]
fn an_archive_without_a_manifest_is_named_by_its_file() {
    let fixture = Fixture::new(&[]);
    mar(&fixture.store("my.model.mar"), &[("service.py", "")]);
    let archive = fixture.open("my.model.mar").unwrap();
    assert_eq!((archive.model_name.as_str(), archive.version.as_str()), ("my.model", "1.0"));
    assert_eq!((archive.handler, archive.yaml.whole), (None, serde_json::json!({})));
}

#[test]
fn refuses_invalid_archives_with_the_reason() {
    let fixture =
        Fixture::new(&[("allowed_urls", "https://models\\.example/.*,file:///nowhere/.*")]);
    let manifest = |text: &str| mar(&fixture.store("m.mar"), &[("MAR-INF/MANIFEST.json", text)]);
    let check = |url: &str, status: u16, part: &str| {
        let refused = fixture.open(url).unwrap_err();
        assert!(refused.status == status && refused.message.contains(part), "{url}: {refused:?}");
    };
    check("none.mar", 404, "Model not found at: none.mar");
    check("../secret.mar", 404, "Relative path is not allowed in url: ../secret.mar");
    for encoded in ["..", "%2e%2e", "%2E.", "..%2fx", "a%2Fx"] {
        check(&format!("file:///nowhere/{encoded}/etc/m.mar"), 404, "Relative path is not allowed");
    }
    check("https://models.example/%2e%2e/m.mar", 404, "Relative path is not allowed");
    check("", 404, "empty url");
    check(
        "http://models.example/m.mar",
        400,
        "Given URL http://models.example/m.mar does not match any allowed URL(s)",
    );
    check("https://models.example.org/m.mar", 400, "does not match any allowed");
    check("/etc", 400, "Given URL /etc does not match");
    check("file:///nowhere/m.mar", 400, "Failed to download archive from: file:///nowhere/m.mar");
    fs::write(fixture.store("m.mar"), "text").unwrap();
    check("m.mar", 400, "Model name is not defined.");
    fs::write(fixture.store("m.mar"), "PK\u{3}\u{4} and nothing more").unwrap();
    check("m.mar", 400, "broken zip file");
    mar(&fixture.store("m.mar"), &[]);
    check("m.mar", 400, "the archive is empty");
    for (text, part) in [
        ("{", "invalid manifest"),
        ("[]", "expected a JSON object"),
        (r#"{"runtime": "python"}"#, "Missing Model entry"),
        (
            r#"{"runtime": "LSP", "model": {"modelName": "m", "modelVersion": "1"}}"#,
            "its runtime is 'LSP'",
        ),
        (r#"{"runtime": "python", "model": {"modelVersion": "1"}}"#, "Model name is not defined."),
        (r#"{"runtime": "python", "model": {"modelName": "m"}}"#, "Model version is not defined."),
        (
            r#"{"runtime": "python", "model": {"modelName": "m", "modelVersion": "1", "configFile": "../c.yaml"}}"#,
            "its configFile '../c.yaml' is outside the archive",
        ),
        (
            r#"{"runtime": "python", "model": {"modelName": "m", "modelVersion": "1", "configFile": "c.yaml"}}"#,
            "cannot read c.yaml",
        ),
    ] {
        manifest(text);
        check("m.mar", 400, part);
    }
    mar(&fixture.store("m.mar"), &[("model-config.yaml", "a: [")]);
    check("m.mar", 400, "model-config.yaml is invalid");
    assert_eq!(fixture.left(), 0, "failed archives leave no files");
}

#[test]
fn writes_nothing_outside_the_archives_directory() {
    let fixture = Fixture::new(&[]);
    let outside = fixture.folder.path().join("outside");
    fs::create_dir(&outside).unwrap();
    for name in ["../evil", "a/../../evil", "/tmp/pharos-evil", "a\\..\\evil"] {
        mar(&fixture.store("m.mar"), &[(name, "x")]);
        let refused = fixture.open("m.mar").unwrap_err();
        assert!(refused.message.contains("is outside the archive"), "{name}: {refused}");
    }
    let target = outside.to_str().unwrap();
    let mut writer = ZipWriter::new(File::create(fixture.store("m.mar")).unwrap());
    writer.add_symlink("out", target, SimpleFileOptions::default()).unwrap();
    writer.finish().unwrap();
    assert!(fixture.open("m.mar").unwrap_err().message.contains("'out' is a link or a device"));
    for (kind, name, link) in [
        (EntryType::Symlink, "out", target),
        (EntryType::Link, "out", "../../../etc/passwd"),
        (EntryType::Fifo, "out", ""),
        (EntryType::Char, "out", ""),
    ] {
        tar_gz(
            &fixture.store("m.tar.gz"),
            &[(kind, name, link), (EntryType::Regular, "out/evil", "x")],
        );
        let refused = fixture.open("m.tar.gz").unwrap_err();
        assert!(refused.message.contains("'out' is a link or a device"), "{kind:?}: {refused}");
    }
    tar_gz(&fixture.store("m.tar.gz"), &[(EntryType::Regular, "../evil", "x")]);
    assert!(fixture.open("m.tar.gz").unwrap_err().message.contains("'../evil' is outside"));
    // A second entry of the same name would overwrite the first after that was checked.
    tar_gz(
        &fixture.store("m.tar.gz"),
        &[(EntryType::Regular, "a", "x"), (EntryType::Regular, "a", "y")],
    );
    assert!(fixture.open("m.tar.gz").unwrap_err().message.contains("contains 'a' twice"));
    assert_eq!((fs::read_dir(&outside).unwrap().count(), fixture.left()), (0, 0));
}

#[test]
fn enforces_limits_whatever_sizes_are_declared() {
    let fixture = Fixture::new(&[]);
    let path = fixture.store("zeros.mar");
    let mut writer = ZipWriter::new(File::create(&path).unwrap());
    writer.start_file("zeros", SimpleFileOptions::default()).unwrap();
    let zeros = vec![0; 1 << 20];
    (0..64).for_each(|_| writer.write_all(&zeros).unwrap());
    writer.finish().unwrap();
    let size = fs::metadata(&path).unwrap().len();
    assert!(size < 1 << 20, "a bomb: {size} bytes");
    let unpack = |path: &Path, bytes: u64, pieces: u64| {
        let target = fixture.folder.path().join("target");
        let _ = fs::remove_dir_all(&target);
        fs::create_dir(&target).unwrap();
        unpack::unpack(&File::open(path).unwrap(), path, &target, &unpack::Limits { bytes, pieces })
    };
    assert_eq!(unpack(&path, 64 << 20, 1), Ok(()));
    let error = unpack(&path, (64 << 20) - 1, 1).unwrap_err();
    assert!(error.contains("with 'zeros' the unpacked size exceeds 67108863 bytes"), "{error}");
    // The declared size is wrong: the limit applies to the bytes that are written.
    let mut bytes = fs::read(&path).unwrap();
    for at in 0..bytes.len() - 4 {
        if bytes[at..at + 4] == (64u32 << 20).to_le_bytes() {
            bytes[at..at + 4].copy_from_slice(&10u32.to_le_bytes());
        }
    }
    fs::write(&path, bytes).unwrap();
    let error = unpack(&path, 1 << 20, 1).unwrap_err();
    assert!(error.contains("zeros"), "{error}");
    let written = fs::metadata(fixture.folder.path().join("target/zeros"))
        .map_or(0, |metadata| metadata.len());
    assert!(written <= (1 << 20) + 1, "{written} bytes were written");
    mar(&path, &[("a", ""), ("b", "")]);
    assert_eq!(
        unpack(&path, 1, 1).unwrap_err(),
        "the archive has more than 1 files and directories"
    );
    assert_eq!(unpack::Limits::of(&tempfile::tempfile().unwrap()).bytes, 1 << 30);
}

#[test]
fn limits_the_headers_of_an_entry() {
    let fixture = Fixture::new(&[]);
    // Both are read into memory before the entry is known: GNU's long name, and the attributes of
    // pax.
    for kind in [EntryType::GNULongName, EntryType::XHeader] {
        let mut builder = Builder::new(GzEncoder::new(
            File::create(fixture.store("m.tar.gz")).unwrap(),
            Compression::fast(),
        ));
        let name = vec![b'n'; 8 << 20];
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(name.len() as u64);
        header.set_cksum();
        builder.append(&header, &*name).unwrap();
        builder.into_inner().unwrap().finish().unwrap();
        let refused = fixture.open("m.tar.gz").unwrap_err();
        assert!(
            refused.message.contains("attributes of an entry have more than 1048576 bytes"),
            "{kind:?}: {refused}"
        );
    }
}

#[test]
fn accepts_stored_entries_and_refuses_truncated_archives() {
    let fixture = Fixture::new(&[]);
    let mut bytes = Cursor::new(Vec::new());
    let mut writer = ZipWriter::new(&mut bytes);
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored);
    writer.start_file("service.py", stored).unwrap();
    writer.write_all(b"x = 1\n").unwrap();
    writer.finish().unwrap();
    let bytes = bytes.into_inner();
    fs::write(fixture.store("m.mar"), &bytes).unwrap();
    assert_eq!(fixture.open("m.mar").unwrap().model_name, "m");
    for cut in (4..bytes.len()).step_by(7) {
        fs::write(fixture.store("m.mar"), &bytes[..cut]).unwrap();
        let refused = fixture.open("m.mar").unwrap_err();
        assert_eq!(refused.status, 400, "cut at {cut}: {refused}");
    }
    // The contents do not match the checksum.
    let mut other = bytes.clone();
    let at = other.windows(5).position(|piece| piece == b"x = 1").unwrap();
    other[at] = b'y';
    fs::write(fixture.store("m.mar"), &other).unwrap();
    assert!(fixture.open("m.mar").unwrap_err().message.contains("cannot unpack 'service.py'"));
    fs::write(fixture.store("m.tar.gz"), [0x1f, 0x8b, 8, 0, 1, 2, 3]).unwrap();
    assert!(fixture.open("m.tar.gz").unwrap_err().message.contains("broken tar file"));
}

#[test]
fn errors_of_pip_are_shown_whatever_its_output_is() {
    let mut fixture = Fixture::new(&[("install_py_dep_per_model", "true")]);
    // `sh -m pip` runs the file `pip` of the archive.
    fixture.settings.pip.python = "/bin/sh".into();
    let manifest =
        MANIFEST.replace("\"handler\"", "\"requirementsFile\": \"requirements.txt\", \"handler\"");
    let pip = "printf 'caf\\351\\nERROR: no such package\\n' >&2; exit 3";
    let files =
        [("MAR-INF/MANIFEST.json", &*manifest), ("pip", pip), ("requirements.txt", "none\n")];
    mar(&fixture.store("m.mar"), &[&files[..], &FILES[1..]].concat());
    let refused = fixture.open("m.mar").unwrap_err();
    assert!(
        refused.message.ends_with("for model noop: exit status: 3: ERROR: no such package"),
        "{refused}"
    );
}
