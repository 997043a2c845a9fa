package controllers

import (
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// Edits of a sale at every stage, one test per field. What Decide makes of them is in package plan's table.

// child waits for an object of the sale and gives it.
func (w *world) child(o client.Object, name string) {
	w.t.Helper()
	testmysql.Eventually(w.t, name+" is there", func() bool {
		return k8s.Get(ctx, client.ObjectKey{Namespace: w.namespace, Name: name}, o) == nil
	})
}

// seenSpec waits until the controller has acted on the spec as it is.
func (w *world) seenSpec(sale *sales.FlashSale) {
	w.t.Helper()
	w.eventually(sale, "the last change is seen", func() bool { return sale.Status.ObservedGeneration == sale.Generation })
}

func TestUnitsMayShrink(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("caps", 10, time.Hour).In(w)
	w.waitFor(sale, sales.PhaseScheduled)
	w.patch(sale, func() { sale.Spec.Units = 5 })
	w.eventually(sale, "five are left", func() bool { return *sale.Status.Inventory == sales.InventoryStatus{Loaded: 5, Available: 5} })
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(-time.Second)) })
	w.waitFor(sale, sales.PhaseLive)
	w.beKubelet(sale)
	held := w.claim(sale, "ann")
	w.buy(sale, "bob")

	w.patch(sale, func() { sale.Spec.Units = 1 }) // below held + sold
	w.eventually(sale, "the condition says why it cannot", func() bool { return readyReason(sale) == sales.ReasonUnitsInUse })
	loaded := meta.FindStatusCondition(sale.Status.Conditions, sales.ConditionInventoryLoaded)
	if *sale.Status.Inventory != (sales.InventoryStatus{Loaded: 2, Held: 1, Sold: 1}) || sale.Spec.Units != 1 || loaded.Reason != sales.ReasonUnitsInUse ||
		loaded.Message != "spec.units is 1, but 1 held and 1 sold stay: 2 units" {
		t.Errorf("inventory %+v, spec.units %d, condition %+v", sale.Status.Inventory, sale.Spec.Units, loaded)
	}
	testmysql.Eventually(t, "an event says it too", func() bool { return w.events(sale, corev1.EventTypeWarning)[sales.ReasonUnitsInUse] == loaded.Message })
	w.patch(sale, func() { sale.Spec.Units = 4 }) // on second thought
	w.eventually(sale, "four are loaded", func() bool {
		return *sale.Status.Inventory == sales.InventoryStatus{Loaded: 4, Available: 2, Held: 1, Sold: 1} && readyReason(sale) == sales.ReasonLive
	})
	w.patch(sale, func() { sale.Spec.Units = 1 })
	w.eventually(sale, "two are in use", func() bool { return readyReason(sale) == sales.ReasonUnitsInUse })
	if _, err := testmysql.Release(w.store, saleID(sale), held.Reservation.ID); err != nil {
		t.Fatal(err)
	}
	w.waitFor(sale, sales.PhaseClosed) // one unit, and it is sold
	if readyReason(sale) != sales.ReasonSoldOut || *sale.Status.Inventory != (sales.InventoryStatus{Loaded: 1, Sold: 1}) {
		t.Errorf("closed with %s: %+v", readyReason(sale), sale.Status.Inventory)
	}
}

// After an edit the old schedule still fired, or the new one did not.
func TestCaseK13(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("k13", 3, 4*time.Second).Warmup(0).In(w)
	old := sale.Spec.StartTime.Time
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(old.Add(time.Hour)) })
	w.seenSpec(sale)
	testmysql.Eventually(t, "the old start passes", func() bool { return time.Now().After(old.Add(500 * time.Millisecond)) })
	if r := w.claim(sale, "ann"); r.Outcome != inventory.OutcomeNotOpen {
		t.Errorf("at the old start: %v", r.Outcome)
	}
	w.get(sale)
	if sale.Status.Phase != sales.PhaseScheduled || len(w.children()) != 0 || sale.Status.ObservedGeneration != sale.Generation {
		t.Errorf("at the old start: phase %s, children %v", sale.Status.Phase, w.children())
	}
	moved := time.Now().Add(3 * time.Second).Truncate(time.Second)
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(moved) })
	w.waitFor(sale, sales.PhaseLive)
	if r := w.claim(sale, "ann"); r.Outcome != inventory.OutcomeHeld || r.Reservation.GrantedAt.Before(moved) || !sale.Status.OpenedAt.Time.Equal(moved) {
		t.Errorf("at the new start %v: %+v, opened at %v", moved, r, sale.Status.OpenedAt)
	}
}

func TestTheStartMayMove(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("moved", 3, 30*time.Minute).Warmup(time.Hour).In(w)
	w.waitFor(sale, sales.PhaseWarming)
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(3 * time.Hour)) }) // later, after the warm-up began
	w.waitFor(sale, sales.PhaseScheduled)
	testmysql.Eventually(t, "the pods go", func() bool { return len(w.children()) == 0 })
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(30 * time.Minute)) }) // earlier, into the warm-up
	w.waitFor(sale, sales.PhaseWarming)
	testmysql.Eventually(t, "the pods are back", func() bool { return len(w.children()) == usual })
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(-time.Hour)) }) // into the past
	w.waitFor(sale, sales.PhaseLive)
	w.buy(sale, "ann")
}

func TestTheEndMayMoveWhileLive(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("ends", 5, -time.Second).Ends(time.Hour).In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.claim(sale, "ann")
	w.patch(sale, func() { sale.Spec.EndTime = new(metav1.NewTime(time.Now())) })
	w.waitFor(sale, sales.PhaseDraining)
	if r := w.claim(sale, "bob"); r.Outcome != inventory.OutcomeClosed {
		t.Errorf("after the end: %v", r.Outcome)
	}
	w.patch(sale, func() { sale.Spec.EndTime = new(metav1.NewTime(time.Now().Add(time.Hour))) }) // it was a mistake
	w.waitFor(sale, sales.PhaseLive)
	w.buy(sale, "bob")
	w.patch(sale, func() { sale.Spec.EndTime = nil })
	w.seenSpec(sale)
	w.buy(sale, "cat")
	w.patch(sale, func() { sale.Spec.EndTime, sale.Spec.Closing = new(metav1.NewTime(time.Now())), sales.ClosingRelease })
	w.waitFor(sale, sales.PhaseClosed) // ann's hold is released: nobody waits ten minutes for it
	if readyReason(sale) != sales.ReasonEnded || *sale.Status.Inventory != (sales.InventoryStatus{Loaded: 5, Available: 3, Sold: 2}) || sale.Status.Result.Unsold != 3 {
		t.Errorf("closed with %s: %+v, %+v", readyReason(sale), sale.Status.Inventory, sale.Status.Result)
	}
}

func TestHoldTTLAndLimitAreForNewHolds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("ttl", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	before := w.claim(sale, "ann").Reservation
	w.patch(sale, func() { sale.Spec.HoldTTL.Duration, sale.Spec.MaxPerBuyer = time.Minute, 2 })
	w.seenSpec(sale)
	after := w.claim(sale, "bob").Reservation
	if old, now := before.ExpiresAt.Sub(before.GrantedAt), after.ExpiresAt.Sub(after.GrantedAt); old != 10*time.Minute || now != time.Minute {
		t.Errorf("holds of %v before and %v after", old, now)
	}
	if again := w.claim(sale, "ann").Reservation; again.ID != before.ID || !again.ExpiresAt.Equal(before.ExpiresAt) {
		t.Errorf("the hold from before changed: %+v, was %+v", again, before)
	}
	results, err := w.store.Claim(ctx, saleID(sale), inventory.NewLine("two"), []inventory.Request{{Buyer: "cat", Quantity: 2}})
	if err != nil || results[0].Outcome != inventory.OutcomeHeld {
		t.Errorf("two units for one buyer: %+v, %v", results, err)
	}
}

func TestPodsFollowTheSpec(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("shape", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	d := &appsv1.Deployment{}
	reread := func() *corev1.PodSpec { w.child(d, reserverName(sale)); return &d.Spec.Template.Spec }
	pod := reread()
	if *d.Spec.Replicas != 2 || pod.Containers[0].Image != "flashsale:test" || len(pod.TopologySpreadConstraints) != 2 {
		t.Errorf("%d replicas of %+v", *d.Spec.Replicas, pod)
	}
	w.patch(sale, func() {
		r := &sale.Spec.Reserver
		r.Replicas, r.Image = 3, "flashsale:other"
		r.Pod = sales.PodSpec{Labels: map[string]string{"team": "drops"}, Annotations: map[string]string{"note": "x"}, NodeSelector: map[string]string{"pool": "drops"},
			Tolerations: []corev1.Toleration{{Key: "drops", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule}},
			Affinity: &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{
				{TopologyKey: "kubernetes.io/hostname", LabelSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "drops"}}}}}},
			TopologySpread: []string{"rack"}, PriorityClassName: "system-cluster-critical", ImagePullSecrets: []sales.SecretReference{{Name: "registry"}}}
		sale.Spec.Admission.BuyerHeader, sale.Spec.Admission.MaxInFlight = "X-Customer", 500
	})
	testmysql.Eventually(t, "the Deployment follows", func() bool { pod = reread(); return pod.Containers[0].Image == "flashsale:other" })
	template := d.Spec.Template
	if *d.Spec.Replicas != 3 || template.Labels["team"] != "drops" || template.Annotations["note"] != "x" || pod.NodeSelector["pool"] != "drops" || len(pod.Tolerations) != 1 ||
		pod.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution[0].TopologyKey != "kubernetes.io/hostname" ||
		len(pod.TopologySpreadConstraints) != 1 || pod.TopologySpreadConstraints[0].TopologyKey != "rack" || pod.PriorityClassName != "system-cluster-critical" || pod.ImagePullSecrets[0].Name != "registry" {
		t.Errorf("%d replicas, template %+v", *d.Spec.Replicas, template)
	}
	if args := pod.Containers[0].Args; !slices.Contains(args, "--buyer-header=X-Customer") || !slices.Contains(args, "--max-in-flight=500") {
		t.Errorf("arguments %q", args)
	}
	budget := &policyv1.PodDisruptionBudget{}
	w.child(budget, reserverName(sale))
	if budget.Spec.MaxUnavailable.IntValue() != 1 || budget.Spec.Selector.MatchLabels[sales.LabelSaleUID] != string(sale.UID) {
		t.Errorf("PodDisruptionBudget %+v", budget.Spec)
	}
}

// Who buyers are is in the pods' arguments: an edit replaces the pods.
func TestAdmissionFollowsTheSpec(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("let-in", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	d := &appsv1.Deployment{}
	w.child(d, reserverName(sale))
	container := d.Spec.Template.Spec.Containers[0]
	want := []string{"serve", "--listen=:8080", "--admin=:9090", "--keys=/etc/flashsale/keys/keys.json", "--buyer-header=X-Buyer-Id", "--max-in-flight=20000",
		"--trusted-proxies=10.0.0.0/8", "--buyer-rate=5", "--buyer-burst=10", "--address-rate=0", "--address-burst=100"}
	if !slices.Equal(container.Args, want) {
		t.Errorf("arguments %q, want %q", container.Args, want)
	}
	if limit := (corev1.EnvVar{Name: "GOMEMLIMIT", Value: "483183821"}); !slices.Contains(container.Env, limit) { // 90% of 512Mi
		t.Errorf("environment %+v", container.Env)
	}
	for _, tt := range []struct {
		name      string
		edit      func(*sales.AdmissionSpec)
		gone, new []string
	}{
		{"proxies", func(a *sales.AdmissionSpec) { a.TrustedProxies = []string{"192.0.2.7/32", "fd00::/8"} },
			[]string{"--trusted-proxies=10.0.0.0/8"}, []string{"--trusted-proxies=192.0.2.7/32,fd00::/8"}},
		{"tokens", func(a *sales.AdmissionSpec) {
			a.JWT = &sales.JWTSpec{Issuer: "https://id.example", Audience: "drops", JWKSURL: "https://id.example/jwks", BuyerClaim: "email", Leeway: metav1.Duration{Duration: time.Minute}}
		}, nil, []string{"--jwt-issuer=https://id.example", "--jwt-audience=drops", "--jwt-jwks=https://id.example/jwks", "--jwt-buyer-claim=email", "--jwt-leeway=1m0s"}},
		{"no proxies", func(a *sales.AdmissionSpec) { a.TrustedProxies = nil }, []string{"--trusted-proxies=192.0.2.7/32,fd00::/8"}, nil},
		{"limits", func(a *sales.AdmissionSpec) {
			a.RateLimits = sales.RateLimitsSpec{Buyer: sales.BuyerRateLimit{PerSecond: new(int32(0)), Burst: 1}, Address: sales.AddressRateLimit{PerSecond: 50, Burst: 200}}
		}, []string{"--buyer-rate=5", "--address-rate=0"}, []string{"--buyer-rate=0", "--buyer-burst=1", "--address-rate=50", "--address-burst=200"}},
	} {
		before := d.Generation
		w.patch(sale, func() { tt.edit(&sale.Spec.Admission) })
		testmysql.Eventually(t, "the pods are to be replaced: "+tt.name, func() bool { w.child(d, reserverName(sale)); return d.Generation != before })
		args := d.Spec.Template.Spec.Containers[0].Args
		for _, arg := range tt.new {
			if !slices.Contains(args, arg) {
				t.Errorf("%s: no %s in %q", tt.name, arg, args)
			}
		}
		for _, arg := range tt.gone {
			if slices.Contains(args, arg) {
				t.Errorf("%s: %s still in %q", tt.name, arg, args)
			}
		}
	}
	w.patch(sale, func() { sale.Spec.Reserver.Resources = &corev1.ResourceRequirements{} })
	testmysql.Eventually(t, "without a limit, there is none for the heap", func() bool {
		w.child(d, reserverName(sale))
		return !slices.ContainsFunc(d.Spec.Template.Spec.Containers[0].Env, func(e corev1.EnvVar) bool { return e.Name == "GOMEMLIMIT" })
	})
}

// Under an autoscaler the number of pods is its affair: the controller only raises it to the full size, until the sale is
// a minute old, and says so in the autoscaler's own bound.
func TestAutoscaling(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("scaled", 5, 30*time.Minute).Warmup(time.Hour).In(w)
	w.waitFor(sale, sales.PhaseWarming)
	d, hpa := &appsv1.Deployment{}, &autoscalingv2.HorizontalPodAutoscaler{}
	replicas := func() int32 { w.child(d, reserverName(sale)); return *d.Spec.Replicas }
	scaleTo := func(n int32) { // as the autoscaler does
		w.child(d, reserverName(sale))
		scale := &autoscalingv1.Scale{Spec: autoscalingv1.ScaleSpec{Replicas: n}}
		if err := k8s.SubResource("scale").Update(ctx, d, client.WithSubResourceBody(scale)); err != nil {
			t.Fatal(err)
		}
	}
	if n := replicas(); n != 2 {
		t.Errorf("%d replicas", n)
	}
	w.patch(sale, func() {
		sale.Spec.Reserver.Replicas = 4
		sale.Spec.Reserver.Autoscaling = &sales.AutoscalingSpec{MinReplicas: 1, MaxReplicas: 9, TargetCPUUtilizationPercentage: 60}
	})
	w.child(hpa, reserverName(sale))
	if *hpa.Spec.MinReplicas != 4 || hpa.Spec.MaxReplicas != 9 || *hpa.Spec.Metrics[0].Resource.Target.AverageUtilization != 60 || hpa.Spec.ScaleTargetRef.Name != reserverName(sale) {
		t.Errorf("before the start, the autoscaler is %+v", hpa.Spec)
	}
	testmysql.Eventually(t, "it is of full size before the start", func() bool { return replicas() == 4 })
	testmysql.Eventually(t, "the controller's configuration does not own the number", func() bool { replicas(); return !ownsReplicas(d.ManagedFields) })
	scaleTo(1)
	testmysql.Eventually(t, "it is of full size again", func() bool { return replicas() == 4 })
	scaleTo(7)
	w.patch(sale, func() { sale.Spec.Reserver.Pod.Labels = map[string]string{"team": "drops"} }) // makes the controller apply
	testmysql.Eventually(t, "the Deployment follows", func() bool { replicas(); return d.Spec.Template.Labels["team"] == "drops" })
	w.eventually(sale, "the status shows the autoscaler's number", func() bool { return sale.Status.Reservers != nil && sale.Status.Reservers.Desired == 7 })
	if n := replicas(); n != 7 {
		t.Errorf("%d replicas after the autoscaler wanted 7", n)
	}
	w.patch(sale, func() { sale.Spec.StartTime = metav1.NewTime(time.Now().Add(-2 * time.Minute)) })
	testmysql.Eventually(t, "the autoscaler may shrink it", func() bool { w.child(hpa, reserverName(sale)); return *hpa.Spec.MinReplicas == 1 })
	scaleTo(1)
	w.patch(sale, func() { sale.Spec.Reserver.Pod.Labels["team"] = "shoes" })
	testmysql.Eventually(t, "the Deployment follows", func() bool { replicas(); return d.Spec.Template.Labels["team"] == "shoes" })
	if n := replicas(); n != 1 {
		t.Errorf("%d replicas after the autoscaler wanted 1", n)
	}
	w.patch(sale, func() { sale.Spec.Reserver.Autoscaling = nil })
	testmysql.Eventually(t, "the number is the spec's again", func() bool { return replicas() == 4 })
	testmysql.Eventually(t, "the autoscaler is gone", func() bool {
		return !slices.Contains(w.children(), "HorizontalPodAutoscaler/"+reserverName(sale))
	})
}

// The minimum and the desired number disagreed, and zero was never reached.
func TestCaseK08(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	build := w.makeSale("k08", 3, -time.Minute).Ends(time.Hour).TTL(15 * time.Second)
	build.Spec.Reserver.Autoscaling = &sales.AutoscalingSpec{MinReplicas: 2, MaxReplicas: 5}
	sale := build.In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.claim(sale, "ann")
	w.patch(sale, func() { sale.Spec.EndTime = new(metav1.NewTime(time.Now())) })
	w.waitFor(sale, sales.PhaseDraining)
	d := &appsv1.Deployment{}
	if w.child(d, reserverName(sale)); *d.Spec.Replicas < 1 {
		t.Errorf("%d replicas while a hold is live", *d.Spec.Replicas)
	}
	w.waitFor(sale, sales.PhaseClosed)
	if !sale.Status.Audit.Passed {
		t.Errorf("audit %+v", sale.Status.Audit)
	}
	testmysql.Eventually(t, "no pod, and nothing that would make one", func() bool { return len(w.children()) == 0 })
}

func TestExposure(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage()
	sale := w.makeSale("shown", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	name := reserverName(sale)
	service, policy, ingress, route := &corev1.Service{}, &networkingv1.NetworkPolicy{}, &networkingv1.Ingress{}, emptyRoute().(*unstructured.Unstructured)
	w.child(policy, name)
	if ports := policy.Spec.Ingress; len(ports) != 2 || ports[0].From != nil || ports[0].Ports[0].Port.StrVal != "http" || ports[1].From[0].NamespaceSelector == nil || ports[1].Ports[0].Port.StrVal != "admin" {
		t.Errorf("NetworkPolicy %+v", policy.Spec)
	}
	w.patch(sale, func() {
		sale.Spec.Reserver.Service = sales.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Annotations: map[string]string{"lb.example/kind": "fast"}}
		sale.Spec.Reserver.Ingress = &sales.IngressSpec{Host: "drops.shop.example", ClassName: "edge", TLSSecretName: "drops-tls", Annotations: map[string]string{"edge.example/rate": "100"}}
	})
	w.child(ingress, name)
	backend := ingress.Spec.Rules[0].HTTP.Paths[0]
	if ingress.Spec.Rules[0].Host != "drops.shop.example" || *ingress.Spec.IngressClassName != "edge" || ingress.Spec.TLS[0].SecretName != "drops-tls" ||
		ingress.Annotations["edge.example/rate"] != "100" || backend.Path != "/" || backend.Backend.Service.Name != name || backend.Backend.Service.Port.Number != 80 {
		t.Errorf("Ingress %+v", ingress.Spec)
	}
	testmysql.Eventually(t, "the Service follows", func() bool {
		w.child(service, name)
		return service.Spec.Type == corev1.ServiceTypeLoadBalancer && service.Annotations["lb.example/kind"] == "fast"
	})
	w.patch(sale, func() {
		sale.Spec.Reserver.Ingress = nil
		sale.Spec.Reserver.HTTPRoute = &sales.HTTPRouteSpec{ParentRefs: []sales.GatewayReference{{Name: "shop", Namespace: "edge", SectionName: "https"}}, Hostnames: []string{"drops.shop.example"}}
	})
	w.child(route, name)
	testmysql.Eventually(t, "the Ingress is gone", func() bool { return !slices.Contains(w.children(), "Ingress/"+name) })
	parents, _, _ := unstructured.NestedSlice(route.Object, "spec", "parentRefs")
	hosts, _, _ := unstructured.NestedStringSlice(route.Object, "spec", "hostnames")
	if parent := parents[0].(map[string]any); parent["name"] != "shop" || parent["namespace"] != "edge" || parent["sectionName"] != "https" || !slices.Equal(hosts, []string{"drops.shop.example"}) {
		t.Errorf("HTTPRoute %+v", route.Object["spec"])
	}
	if err := k8s.Delete(ctx, sale); err != nil {
		t.Fatal(err)
	}
	w.gone(sale)
	if err := k8s.Get(ctx, client.ObjectKeyFromObject(route), route); client.IgnoreNotFound(err) != nil || err == nil {
		t.Errorf("the HTTPRoute is still there: %v", err)
	}
}

// A cluster without the Gateway API: the sale runs all the same, and says what is missing.
func TestNoGatewayAPI(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.manage(func(m *managed) { m.reconciler.HTTPRoutes = false })
	build := w.makeSale("routeless", 5, -time.Second)
	build.Spec.Reserver.HTTPRoute = &sales.HTTPRouteSpec{ParentRefs: []sales.GatewayReference{{Name: "shop"}}}
	sale := build.In(w)
	w.eventually(sale, "it is said", func() bool { return readyReason(sale) == sales.ReasonNoGatewayAPI })
	testmysql.Eventually(t, "the rest is there", func() bool { return len(w.children()) == usual })
	w.patch(sale, func() { sale.Spec.Reserver.HTTPRoute = nil })
	w.eventually(sale, "it is mended", func() bool { return readyReason(sale) == sales.ReasonUnavailable })
	if found, err := HasGatewayAPI(cfg); err != nil || !found {
		t.Errorf("the API server has the Gateway API, but HasGatewayAPI says %t, %v", found, err)
	}
}

// The Secret gets another user: pods are replaced, the controller takes a new pool, and the old one goes when its last
// sale has left.
func TestTheSecretIsRotated(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	m := w.manage()
	sale := w.makeSale("rotated", 5, -time.Second).In(w)
	w.waitFor(sale, sales.PhaseLive)
	w.beKubelet(sale)
	d := &appsv1.Deployment{}
	w.child(d, reserverName(sale))
	const fingerprint = "sales.flashsale.dev/database"
	before := d.Spec.Template.Annotations[fingerprint]
	w.buy(sale, "ann")
	user := "r" + strings.ReplaceAll(w.namespace, "-", "")
	admin := testmysql.Admin(t)
	for _, q := range []string{"CREATE USER " + user + " IDENTIFIED BY 'rotated'", "GRANT ALL ON *.* TO " + user} {
		if _, err := admin.ExecContext(ctx, q); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { _, _ = admin.ExecContext(ctx, "DROP USER "+user) })
	w.secret(map[string]string{"dsn": strings.Replace(w.dsn, "root@", user+":rotated@", 1)})
	testmysql.Eventually(t, "the pods are to be replaced", func() bool {
		w.child(d, reserverName(sale))
		return d.Spec.Template.Annotations[fingerprint] != before
	})
	if d.Spec.Strategy.RollingUpdate.MaxUnavailable.IntValue() != 0 || len(d.Spec.Template.Annotations[fingerprint]) != 16 {
		t.Errorf("strategy %+v, annotations %v", d.Spec.Strategy.RollingUpdate, d.Spec.Template.Annotations)
	}
	testmysql.Eventually(t, "there is one pool", func() bool {
		m.reconciler.Databases.mu.Lock()
		defer m.reconciler.Databases.mu.Unlock()
		return len(m.reconciler.Databases.pools) == 1
	})
	w.buy(sale, "bob")
	w.eventually(sale, "the counts go on", func() bool { return sale.Status.Inventory.Sold == 2 && readyReason(sale) == sales.ReasonLive })
	warnings := w.events(sale, corev1.EventTypeWarning)
	delete(warnings, "NotWarm") // it was applied after its start
	if len(warnings) != 0 {
		t.Errorf("warnings: %v", warnings)
	}
}

// Suspended and resumed at every phase: the gate obeys, and the rest goes on.
func TestSuspendAtEveryPhase(t *testing.T) {
	t.Parallel()
	for phase, tt := range map[sales.Phase]struct {
		starts    time.Duration
		suspended sales.Phase // the phase while suspended
	}{
		sales.PhaseScheduled: {3 * time.Hour, sales.PhaseScheduled},
		sales.PhaseWarming:   {30 * time.Minute, sales.PhaseSuspended},
		sales.PhaseLive:      {-time.Second, sales.PhaseSuspended},
		sales.PhaseDraining:  {-time.Second, sales.PhaseDraining},
	} {
		t.Run(string(phase), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			w.manage()
			sale := w.makeSale("susp", 3, tt.starts).Warmup(time.Hour).In(w)
			if phase == sales.PhaseDraining {
				w.waitFor(sale, sales.PhaseLive)
				w.claim(sale, "ann")
				w.patch(sale, func() { sale.Spec.EndTime = new(metav1.NewTime(time.Now())) })
			}
			w.waitFor(sale, phase)
			w.patch(sale, func() { sale.Spec.Suspend = true })
			w.seenSpec(sale)
			w.eventually(sale, "it is suspended", func() bool { return sale.Status.Phase == tt.suspended })
			if r := w.claim(sale, "bob"); r.Outcome == inventory.OutcomeHeld {
				t.Error("a hold was granted while suspended")
			}
			w.patch(sale, func() { sale.Spec.Suspend = false })
			w.seenSpec(sale)
			w.eventually(sale, "it is resumed", func() bool { return sale.Status.Phase == phase })
			if r := w.claim(sale, "bob"); (r.Outcome == inventory.OutcomeHeld) != (phase == sales.PhaseLive) {
				t.Errorf("resumed, a claim got %v", r.Outcome)
			}
		})
	}
}
