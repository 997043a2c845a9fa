// Package gitops checks how GitOps tools judge FlashSales: kstatus, which Flux and kpt ask, and the health script for
// Argo CD. The objects were recorded from a real API server by the tests of package controllers, one of every phase and
// of every kind of trouble.
package gitops

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/cli-utils/pkg/kstatus/status"
	"sigs.k8s.io/yaml"

	// Not used here: the version pinned in go.mod is the one whose CRDs the tests of package controllers install.
	_ "sigs.k8s.io/gateway-api/apis/v1"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/test/teststatus"
)

// recorded gives the objects by the name of what they show.
func recorded(t *testing.T) map[string]*unstructured.Unstructured {
	t.Helper()
	files, err := filepath.Glob("../../controllers/testdata/objects/*.yaml")
	if err != nil || len(files) < 12 {
		t.Fatalf("%d recorded objects: %v", len(files), err)
	}
	all := map[string]*unstructured.Unstructured{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		u := &unstructured.Unstructured{}
		json, err := yaml.YAMLToJSON(text) // whole numbers stay whole
		if err == nil {
			err = u.UnmarshalJSON(json)
		}
		if err != nil {
			t.Fatalf("%s: %v", f, err)
		}
		all[strings.TrimSuffix(filepath.Base(f), ".yaml")] = u
	}
	return all
}

// want is what kstatus and Argo CD are to say of each recorded object.
var want = map[string]struct {
	kstatus status.Status
	argo    string
}{
	"unseen":               {status.InProgressStatus, "Progressing"},
	"pending":              {status.InProgressStatus, "Progressing"},
	"loading":              {status.InProgressStatus, "Progressing"},
	"scheduled":            {status.CurrentStatus, "Healthy"}, // Flux with wait: true is satisfied here
	"warming-unready":      {status.InProgressStatus, "Progressing"},
	"warming":              {status.CurrentStatus, "Healthy"},
	"live":                 {status.CurrentStatus, "Healthy"},
	"suspended":            {status.CurrentStatus, "Suspended"},
	"units-in-use":         {status.InProgressStatus, "Progressing"},
	"image-unavailable":    {status.InProgressStatus, "Progressing"},
	"database-unreachable": {status.InProgressStatus, "Progressing"},
	"secret-not-found":     {status.FailedStatus, "Degraded"},
	"tables-lost":          {status.FailedStatus, "Degraded"},
	"audit-failed":         {status.FailedStatus, "Degraded"},
	"draining":             {status.CurrentStatus, "Healthy"},
	"deleting":             {status.TerminatingStatus, "Progressing"},
	"closed-sold-out":      {status.CurrentStatus, "Healthy"},
	"closed-ended":         {status.CurrentStatus, "Healthy"},
	"closed-missed":        {status.CurrentStatus, "Healthy"},
}

func TestEveryRecordedObjectIsJudged(t *testing.T) {
	objects := recorded(t)
	for name := range want {
		if objects[name] == nil {
			t.Errorf("%s is not recorded", name)
		}
	}
	script, err := os.ReadFile("../../config/argocd/health.lua")
	if err != nil {
		t.Fatal(err)
	}
	for name, u := range objects {
		t.Run(name, func(t *testing.T) {
			w, known := want[name]
			if !known {
				t.Fatal("recorded, but nobody says what is to be said of it")
			}
			sale := &sales.FlashSale{}
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, sale); err != nil {
				t.Fatal(err)
			}
			for _, broken := range teststatus.Violations(sale) {
				t.Error(broken)
			}
			if got := kstatusOf(t, u); got != w.kstatus {
				t.Errorf("kstatus says %s, want %s", got, w.kstatus)
			}
			if got, message := argoHealth(t, string(script), u); got != w.argo || message == "" {
				t.Errorf("Argo CD says %s (%s), want %s", got, message, w.argo)
			}
			if u.GetDeletionTimestamp() != nil {
				return
			}
			// What was said of an older spec satisfies nobody.
			u.SetGeneration(u.GetGeneration() + 1)
			if got := kstatusOf(t, u); got != status.InProgressStatus {
				t.Errorf("of an older generation, kstatus says %s", got)
			}
			if got, _ := argoHealth(t, string(script), u); got != "Progressing" {
				t.Errorf("of an older generation, Argo CD says %s", got)
			}
		})
	}
}

func kstatusOf(t *testing.T, u *unstructured.Unstructured) status.Status {
	t.Helper()
	result, err := status.Compute(u)
	if err != nil {
		t.Fatal(err)
	}
	return result.Status
}

// argoHealth runs the script as Argo CD does: the object is the global obj, the result a table.
func argoHealth(t *testing.T, script string, u *unstructured.Unstructured) (health, message string) {
	t.Helper()
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for _, open := range []lua.LGFunction{lua.OpenBase, lua.OpenTable, lua.OpenString} {
		state.Push(state.NewFunction(open))
		state.Call(0, 0)
	}
	state.SetGlobal("obj", toLua(state, u.Object))
	if err := state.DoString(script); err != nil {
		t.Fatal(err)
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		t.Fatalf("the script gave %s", state.Get(-1))
	}
	return table.RawGetString("status").String(), table.RawGetString("message").String()
}

func toLua(state *lua.LState, value any) lua.LValue {
	switch v := value.(type) {
	case map[string]any:
		table := state.NewTable()
		for key, item := range v {
			table.RawSetString(key, toLua(state, item))
		}
		return table
	case []any:
		table := state.NewTable()
		for _, item := range v {
			table.Append(toLua(state, item))
		}
		return table
	case string:
		return lua.LString(v)
	case bool:
		return lua.LBool(v)
	case int64:
		return lua.LNumber(v)
	case float64:
		return lua.LNumber(v)
	}
	return lua.LNil
}
