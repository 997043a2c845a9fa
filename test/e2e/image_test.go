package e2e

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"slices"
	"testing"
)

// The image that "make image" wrote: static binaries, an unprivileged user, certificates and time zones, and no more.
func TestImage(t *testing.T) {
	file, err := os.Open(root + "/dist/flashsale.tar")
	if errors.Is(err, os.ErrNotExist) {
		t.Skip("no image: make image")
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = file.Close() }()
	members := untar(t, file)
	var manifest []struct {
		Config string
		Layers []string
	}
	if err := json.Unmarshal(members["manifest.json"], &manifest); err != nil || len(manifest) != 1 {
		t.Fatalf("manifest %s: %v", members["manifest.json"], err)
	}
	var image struct {
		Config struct {
			User       string
			Env        []string
			Entrypoint []string
		} `json:"config"`
	}
	if err := json.Unmarshal(members[manifest[0].Config], &image); err != nil {
		t.Fatal(err)
	}
	if image.Config.User != "65532:65532" {
		t.Errorf("user %q", image.Config.User)
	}
	if !slices.Contains(image.Config.Env, "ZONEINFO=/usr/local/go/lib/time/zoneinfo.zip") {
		t.Errorf("environment %q", image.Config.Env)
	}
	files := map[string][]byte{}
	for _, layer := range manifest[0].Layers {
		for name, content := range untar(t, bytes.NewReader(members[layer])) {
			files[name] = content
		}
	}
	var names []string
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	want := []string{"etc/ssl/certs/ca-certificates.crt", "manager", "reserver", "usr/local/go/lib/time/zoneinfo.zip"}
	if !slices.Equal(names, want) {
		t.Errorf("files %q, want %q", names, want)
	}
	if !bytes.Contains(files[want[0]], []byte("BEGIN CERTIFICATE")) {
		t.Error("no certificates")
	}
	for _, binary := range []string{"manager", "reserver"} {
		if bytes.Contains(files[binary], []byte("/ld-linux")) {
			t.Errorf("%s is not static", binary)
		}
	}
}

// untar gives the regular files of a tar.
func untar(t *testing.T, r io.Reader) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for archive := tar.NewReader(r); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if header.Typeflag != tar.TypeReg {
			continue
		}
		if files[header.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
	}
}
